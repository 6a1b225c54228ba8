"""The errors of the original that no class of :mod:`torchq.errors` covers: old scripts and tests catch these builtins."""

from __future__ import annotations

from torchq.errors import TorchqError

__all__ = ["LegacyTypeError", "UnsupportedError"]


class LegacyTypeError(TorchqError, TypeError):
    """A descriptor, argument or tensor that pytorch-quantization refused with a ``TypeError``."""


class UnsupportedError(TorchqError, NotImplementedError):
    """Something that pytorch-quantization refused with a ``NotImplementedError``."""
