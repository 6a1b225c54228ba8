"""The exceptions of torchq. Every message reads ``where: got X; expected Y. Fix``.

Each class also derives from the builtin one that Python users expect, so that ``except
ValueError`` catches it too.
"""

from __future__ import annotations

__all__ = [
    "TorchqError",
    "ConfigError",
    "CalibrationError",
    "QuantizationError",
    "FuseError",
    "ExportError",
    "InputError",
    "FrontendError",
    "GraphError",
    "MissingExtraError",
]


class TorchqError(Exception):
    """The base of every error that torchq raises on purpose."""


class ConfigError(TorchqError, ValueError):
    """A descriptor, rule, recipe or pattern is invalid, or matches nothing."""


class CalibrationError(TorchqError, RuntimeError):
    """A range is unknown: there was no data, or it was not finite or of the wrong shape."""


class QuantizationError(TorchqError, RuntimeError):
    """A model or tensor cannot be quantized or restored as asked."""


class FuseError(TorchqError, RuntimeError):
    """A BatchNorm or branch merge was asked for where it would not be exact."""


class ExportError(TorchqError, RuntimeError):
    """A model cannot be exported or deployed as it is."""


class InputError(TorchqError, TypeError, ValueError):
    """A deployed model was called with arguments of another name, number, dtype or shape."""


class FrontendError(TorchqError, ValueError):
    """A model file of another framework cannot be read, or holds what cannot be converted."""


class GraphError(TorchqError, RuntimeError):
    """A model cannot be traced, or a node of a traced model fails when it runs."""


class MissingExtraError(TorchqError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""
