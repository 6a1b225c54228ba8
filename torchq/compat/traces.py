"""Functions of autograd in traces of ``torch.jit``, which cannot store them."""

from typing import Any

import torch


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``; its plain operators in a trace of ``torch.jit``.

    A trace would hold a call of Python, whose names differ at each run: the check of
    ``torch.jit.trace`` refuses two of them, and none can be saved. The exporter of TorchScript
    inlines such calls, or writes them by their ``symbolic``.
    """
    if torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export():
        return function.forward(*arguments)
    return function.apply(*arguments)
