"""Sums of quantized layers in float64, whose result hardly depends on the order of adding."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.graph import operator_of
from torchq.nn.convert import QuantModule
from torchq.nn.integer_bias import is_fixed

_SHORTER = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def exact_sums(model: nn.Module) -> Iterator[None]:
    """Let quantized layers add in float64 inside the ``with`` block.

    An integer kernel adds exactly. The simulation adds float32 products, and about two codes in a
    million fall on the other side of a tie; a deep network turns one such code into another output
    for that image. In the block convolutions, transposed ones, linear layers, projections of
    attention and matrix products, in quantized modules and in calls with a quantized weight,
    multiply and add the same dequantized numbers in float64, and round each result once to the
    type of the input. A layer whose bias the target rounds gives what the codes of its kernel stand
    for: sums times one float32 number, rounded; so do its additions of codes. What is not quantized
    computes as before, and so does the model outside the block. Blocks may be nested, and gradients
    pass.

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
    known = dict(model.named_modules())
    with ExitStack() as handles:
        for module in model.modules():
            if isinstance(module, QuantModule):
                handles.enter_context(_adds_exactly(module, known.get(module.rounded_by)))
        yield


@contextmanager
def _adds_exactly(module: QuantModule, behind_it: nn.Module | None) -> Iterator[None]:
    """Let the calls of one module run inside the mode, also those that fail."""
    running: list[_Float64Products] = []

    def start(*_: Any) -> None:
        running.append(_Float64Products(module, behind_it))
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
    """Computes products of layers and matrices in float64, and rounds as integer kernels do."""

    def __init__(self, layer: Any, behind_it: Any) -> None:
        super().__init__()
        self._layer, self._behind_it = layer, None
        if layer.rounded_by:
            slots = (*layer.input_slots, *layer.weight_slots)
            known = (behind_it, *(getattr(layer, f"{slot}_quantizer") for slot in slots))
            self._behind_it = behind_it if all(map(is_fixed, known)) else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, row = kwargs or {}, operator_of(func)
        rounds = self._behind_it is not None and not torch.is_grad_enabled()
        if row is None or row.kind == "attention":
            return func(*args, **kwargs)
        if not row.layer:
            is_sum = rounds and row.name == "add" and "other" in self._layer.input_slots
            alike = is_sum and _are_alike(*args, **kwargs)
            return self._sum(*args) if alike else func(*args, **kwargs)
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if not tensors or any(t.dtype not in _SHORTER for t in tensors):
            return func(*args, **kwargs)
        doubled = {name: _double(value) for name, value in kwargs.items()}
        result = func(*map(_double, args), **doubled)
        return self._rounded(result) if rounds else result.to(tensors[0].dtype)

    def _rounded(self, result: Tensor) -> Tensor:
        """Return what the codes stand for that a kernel makes of its sums, with one product each.

        ``code = rint(sum * (input scale * weight scale / scale of the result))`` in float32.
        """
        layer, to = self._layer, cast(Any, self._behind_it).scale.reshape(())
        scale = layer.corrected_weight(layer.weight_quantizer.scale).flatten()
        is_linear = isinstance(layer, nn.Linear)
        shape = [1] * result.dim()
        shape[-1 if is_linear else result.dim() - layer.weight.dim() + 1] = -1
        step = (layer.input_quantizer.scale.reshape(()) * scale).view(shape)
        sums = (result / step.double()).round().float()
        return torch.round(sums * (step / to)) * to

    def _sum(self, *operands: Tensor) -> Tensor:
        """Return what the codes stand for that a kernel makes of two tensors of codes.

        ``code = rint(fma(second, ratio, fma(first, ratio, offset)))`` in float32, with unsigned
        codes and the ratios of their scales to that of the result. All is added in float64 and
        rounded, so that a mode around this one takes none of it for the addition.
        """
        inputs: tuple[Any, ...] = (self._layer.input_quantizer, self._layer.other_quantizer)
        first, second, to = (
            quantizer.qparams().stored(signed=False) for quantizer in (*inputs, self._behind_it)
        )
        ratios = first.scale / to.scale, second.scale / to.scale
        moved = (ratios[0] * first.zero_point).double() + (ratios[1] * second.zero_point).double()
        total = to.zero_point - moved.float()
        for x, own, ratio in zip(operands, (first, second), ratios, strict=True):
            codes = (x / own.scale).round().double() + own.zero_point
            total = (codes * ratio.double() + total.double()).float()
        return (total.round() - to.zero_point) * to.scale


def _are_alike(*operands: Any, **options: Any) -> bool:
    """Return True for two float32 tensors of one shape."""
    if options or not all(isinstance(x, Tensor) and x.dtype is torch.float32 for x in operands):
        return False
    return len({x.shape for x in operands}) == 1


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value
