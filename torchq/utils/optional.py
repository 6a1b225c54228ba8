"""The optional packages of export, and the error that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from torchq.errors import MissingExtraError

__all__ = ["need"]


def need(module: str, what: str, extra: str = "export") -> Any:
    """Import and return ``module``.

    Args:
        module: dotted name, ``"onnx.helper"``.
        what: who needs it, for the error text.
        extra: the extra of torchq that brings it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{what}: {package} is not installed ({error}); expected it. Run pip install torchq[{extra}]"
        ) from None
