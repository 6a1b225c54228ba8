"""The version, read by setup.py without importing torch."""

__all__ = ["__version__"]

__version__ = "0.1.0"
