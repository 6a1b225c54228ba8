"""The release of pytorch-quantization whose names and behaviour are offered."""

__all__ = ["__version__"]

__version__ = "2.2.1"
