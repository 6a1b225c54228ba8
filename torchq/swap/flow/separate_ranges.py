"""Ranges of concatenated tensors: one for all of them, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import call_model, state_kept
from torchq.nn import QuantCat, TensorQuantizer
from torchq.utils import evaluating

__all__ = ["separate_ranges_"]


@dataclass(frozen=True)
class _Range:
    """What a tensor of a concatenation holds: its largest magnitude, and negative values or not."""

    amax: float
    is_signed: bool


def separate_ranges_(model: nn.Module, example: Any, most_unequal: float) -> list[str]:
    """Give each tensor of a concatenation its own range where their ranges differ much, in place.

    A tensor whose range is a third of the shared one has a third of the codes. The layers that
    read the tensor get its own range too, so a chain of layers whose results are concatenated, as
    in HGNetV2, gains most.

    So do tensors of which only some have negative values: codes that begin at 0 include the ReLU
    in front of them, and others leave it, with the convolution before it, in float.

    Before: the tensors of each quantized concatenation have one range. After: those with a ratio
    of ranges above ``most_unequal`` on the example, or with and without negative values, have one
    each.

    Args:
        model: quantized; it runs once on ``example`` with all quantizers off, in eval mode.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.
        most_unequal: the largest ratio of two ranges that are still shared.

    Returns:
        The paths of the concatenations that were changed.
    """
    found = {id(m): (name, m) for name, m in model.named_modules() if isinstance(m, QuantCat)}
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    modes = [(quantizer, quantizer.mode) for quantizer in quantizers]
    ranges: dict[int, list[list[_Range]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        tensors = args[0] if args else ()
        if isinstance(tensors, Sequence) and all(isinstance(t, Tensor) for t in tensors):
            ranges.setdefault(id(module), []).append([_range_of(t) for t in tensors])

    handles = [module.register_forward_pre_hook(note) for _, module in found.values()]
    try:
        for quantizer in quantizers:
            quantizer.mode = "off"
        with torch.no_grad(), evaluating(model), state_kept(model):
            if found:
                call_model(model, example)
    finally:
        for handle in handles:
            handle.remove()
        for quantizer, mode in modes:
            quantizer.mode = mode
    changed = [found[key] for key, calls in ranges.items() if _differ(calls, most_unequal)]
    for _, module in changed:
        module.separate_ranges_(len(ranges[id(module)][0]))
    return [name for name, _ in changed]


def _range_of(tensor: Tensor) -> _Range:
    if not tensor.numel():
        return _Range(0.0, False)
    return _Range(float(tensor.abs().max()), bool(tensor.min() < 0))


def _differ(calls: list[list[_Range]], most_unequal: float) -> bool:
    """Return True if the ranges differ in one call, and all calls have as many tensors."""
    same_count = len({len(call) for call in calls}) == 1
    return same_count and any(_differ_in(call, most_unequal) for call in calls if call)


def _differ_in(call: list[_Range], most_unequal: float) -> bool:
    sizes = [found.amax for found in call]
    signs = {found.is_signed for found in call}
    return max(sizes) > most_unequal * min(sizes) or len(signs) > 1
