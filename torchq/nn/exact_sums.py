"""Sums of quantized layers in float64, whose result hardly depends on the order of adding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.graph import operator_of
from torchq.nn.convert import QuantModule

_SHORTER = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def exact_sums(model: nn.Module) -> Iterator[None]:
    """Let quantized layers add in float64 inside the ``with`` block.

    An integer kernel adds exactly. The simulation adds float32 products, and about two codes in a
    million fall on the other side of a tie; a deep network turns one such code into another output
    for that image. In the block convolutions, transposed ones, linear layers, projections of
    attention and matrix products, in quantized modules and in calls with a quantized weight,
    multiply and add the same dequantized numbers in float64, and round each result once to the
    type of the input. What is not quantized computes as before, and so does the model outside the
    block. Blocks may be nested, and gradients pass.

    Args:
        model: The quantized model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> report = torchq.quantize_(model)
        >>> x = torch.randn(2, 64)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> with torchq.exact_sums(model):
        ...     model(x).dtype
        torch.float32
    """
    with ExitStack() as handles:
        for module in model.modules():
            if isinstance(module, QuantModule):
                handles.enter_context(_adds_exactly(module))
        yield


@contextmanager
def _adds_exactly(module: nn.Module) -> Iterator[None]:
    """Let the calls of one module run inside the mode, also those that fail."""
    running: list[_Float64Products] = []

    def start(*_: Any) -> None:
        running.append(_Float64Products())
        running[-1].__enter__()

    def end(*_: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    # In front of other hooks, which may fail.
    before = module.register_forward_pre_hook(start, prepend=True)
    behind = module.register_forward_hook(end, prepend=True, always_call=True)
    try:
        yield
    finally:
        before.remove()
        behind.remove()
        while running:  # An interrupt calls no hook.
            end()


class _Float64Products(TorchFunctionMode):
    """Computes products of layers and matrices in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, row = kwargs or {}, operator_of(func)
        if row is None or not row.layer or row.kind == "attention":
            return func(*args, **kwargs)
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if not tensors or any(t.dtype not in _SHORTER for t in tensors):
            return func(*args, **kwargs)
        doubled = {name: _double(value) for name, value in kwargs.items()}
        return func(*map(_double, args), **doubled).to(tensors[0].dtype)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value
