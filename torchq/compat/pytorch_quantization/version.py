"""The release of pytorch-quantization whose names and behaviour are offered."""

__version__ = "2.2.1"
