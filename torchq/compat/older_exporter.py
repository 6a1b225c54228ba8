"""The exporter that was torch's default when scripts for pytorch-quantization were written."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchq.errors import ExportError


@contextmanager
def older_exporter_by_default() -> Iterator[None]:
    """Let ``torch.onnx.export`` take the TorchScript exporter where a call names none, meanwhile.

    torch 2.9 changed the default of ``dynamo`` to True, and the code around old models is often
    such that ``torch.export`` cannot follow it. A call that says ``dynamo=`` gets what it says.
    """
    export = torch.onnx.export  # noqa: TID251  # The call is the script's own.
    has_older = "dynamo" in inspect.signature(export).parameters

    @functools.wraps(export)
    def with_older_default(*args: Any, **kwargs: Any) -> Any:
        if "dynamo" not in kwargs and not has_older:
            raise ExportError(
                f"torch.onnx.export: torch {torch.__version__} has no TorchScript exporter; "
                "expected one, which the script was written for. Install an older torch, or "
                "let the script say dynamo=True"
            )
        return export(*args, **{"dynamo": False, **kwargs})

    torch.onnx.export = with_older_default  # noqa: TID251
    try:
        yield
    finally:
        torch.onnx.export = export  # noqa: TID251
