"""Help with ``torch.compile``, and with ``torch.jit.trace``, which the ONNX exporter runs too."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["calls_are_recorded", "constant_while_tracing", "uncompiled"]


def calls_are_recorded() -> bool:
    """Return True while ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` record calls.

    Shortcuts past torch's dispatcher would be lost then, and so would decisions by values.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@contextmanager
def _ignore_tracer_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def constant_while_tracing() -> AbstractContextManager[None]:
    """Return a context in which shapes and ranges may be read as Python values.

    They are constants of the traced model there, and reading them gives no TracerWarning.
    """
    return _ignore_tracer_warnings() if torch.jit.is_tracing() else nullcontext()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what ``torch.compile`` made as it is written, inside a ``with`` block or a function.

    A compiler follows hooks and patched forwards for minutes, and keeps what it saw of them.
    """
    if "torch._dynamo" not in sys.modules:  # Nothing is compiled yet, and it takes long to load.
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
