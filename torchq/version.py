"""The version of torchq; the build reads this file as text."""

__all__ = ["__version__"]

__version__ = "0.2.0"
