"""Ranges of concatenated tensors: one for all of them, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import call_model, state_kept
from torchq.nn import QuantCat, TensorQuantizer
from torchq.utils import evaluating

__all__ = ["separate_ranges_"]


def separate_ranges_(model: nn.Module, example: Any, most_unequal: float) -> list[str]:
    """Give each tensor of a concatenation its own range where their ranges differ much, in place.

    A tensor whose range is a third of the shared one has a third of the codes. The layers that
    read the tensor get its own range too, so a chain of layers whose results are concatenated, as
    in HGNetV2, gains most.

    Before: the tensors of each quantized concatenation have one range. After: those with a ratio
    of ranges above ``most_unequal`` on the example have one each.

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
    ranges: dict[int, list[list[float]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        tensors = args[0] if args else ()
        if isinstance(tensors, Sequence) and all(isinstance(t, Tensor) for t in tensors):
            largest = [float(t.abs().max()) if t.numel() else 0.0 for t in tensors]
            ranges.setdefault(id(module), []).append(largest)

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


def _differ(calls: list[list[float]], most_unequal: float) -> bool:
    """Return True if the ranges differ in one call, and all calls have as many tensors."""
    same_count = len({len(call) for call in calls}) == 1
    return same_count and any(max(call) > most_unequal * min(call) for call in calls if call)
