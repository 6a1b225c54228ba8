"""Errors that old scripts catch by a builtin class, and that :mod:`torchq.errors` does not have."""

from torchq.errors import TorchqError


class LegacyTypeError(TorchqError, TypeError):
    """A descriptor, argument or tensor that pytorch-quantization refused with a ``TypeError``."""


class UnsupportedError(TorchqError, NotImplementedError):
    """Something that pytorch-quantization refused with a ``NotImplementedError``."""
