"""Help with ``torch.jit.trace``, which also runs inside the TorchScript ONNX exporter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["constant_while_tracing"]


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
