"""Living with ``torch.jit.trace``, which also runs under the TorchScript ONNX exporter."""

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
    """Inside, reading shapes and ranges as Python values gives no TracerWarning: they are constants of the traced model."""
    return _ignore_tracer_warnings() if torch.jit.is_tracing() else nullcontext()
