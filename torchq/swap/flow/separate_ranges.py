"""Ranges of concatenated tensors: one for all of them, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchq.graph import Call, Flow, call_model, record, state_kept
from torchq.nn import QuantCat, TensorQuantizer
from torchq.swap.flow.calls import is_leaf, moves_elements, quantizes
from torchq.utils import evaluating

__all__ = ["separate_ranges_"]

#: Where the elements of a tensor lie, and how many they are: views of all of it have the same.
_Key: TypeAlias = tuple[int, int]
_PARTS = frozenset(["chunk", "split", "tensor_split", "getitem", "__getitem__"])


@dataclass(frozen=True)
class _Range:
    """What a tensor of a concatenation holds: its largest magnitude, and negative values or not."""

    amax: float
    is_signed: bool


def separate_ranges_(model: nn.Module, example: Any, most_unequal: float) -> list[str]:
    """Give each tensor of a concatenation its own range where their ranges differ much, in place.

    A tensor whose range is a third of the shared one has a third of the codes. The layers that
    read the tensor get its own range too, so a chain of layers whose results are concatenated, as
    in HGNetV2, gains most. Where nothing else reads the tensors, and the concatenation is quantized
    with one range right away, as in GoogLeNet and ShuffleNet, nothing is gained: they share it.

    Tensors of which only some have negative values have their own as well: codes that begin at 0
    include the ReLU in front of them, and others leave it, with the convolution before it, in
    float.

    Before: the tensors of each quantized concatenation have one range. After: those with a ratio
    of ranges above ``most_unequal`` on the example, or with and without negative values, have one
    each.

    Args:
        model: quantized; it runs once on ``example`` with all quantizers off, in eval mode, and
            once with all on where there are concatenations.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.
        most_unequal: the largest ratio of two ranges that are still shared.

    Returns:
        The paths of the concatenations that were changed.
    """
    found = {id(m): (name, m) for name, m in model.named_modules() if isinstance(m, QuantCat)}
    if not found:
        return []
    flow, seen = record(model, example, is_leaf), _Seen()
    seen.run(model, example, [module for _, module in found.values()])
    changed = [
        found[key]
        for key, calls in seen.ranges.items()
        if _is_mixed(calls)
        or (_differ(calls, most_unequal) and (seen.read_elsewhere(key) or _is_float(flow, key)))
    ]
    for _, module in changed:
        module.separate_ranges_(len(seen.ranges[id(module)][0]))
    return [name for name, _ in changed]


@dataclass
class _Seen:
    """What one run shows of concatenations.

    Attributes:
        ranges: id of a concatenation -> the ranges of its tensors, in each call.
        operands: id of a concatenation -> its tensors.
        readers: tensor -> ids of the concatenations, and of other quantizers, that read it.
    """

    ranges: dict[int, list[list[_Range]]] = field(default_factory=dict)
    operands: dict[int, set[_Key]] = field(default_factory=dict)
    readers: dict[_Key, set[int]] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # Memory is not used again meanwhile.

    def run(self, model: nn.Module, example: Any, concatenations: Sequence[QuantCat]) -> None:
        """Run a model with all quantizers off, and note what its concatenations read."""
        quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
        modes = [(quantizer, quantizer.mode) for quantizer in quantizers]
        owners = {id(q): id(cat) for cat in concatenations for q in cat.modules()}
        with ExitStack() as stack:
            for quantizer, mode in modes:
                stack.callback(setattr, quantizer, "mode", mode)
                quantizer.mode = "off"
                note = partial(self._note_reader, owners.get(id(quantizer), id(quantizer)))
                stack.callback(quantizer.register_forward_pre_hook(note).remove)
            for module in concatenations:
                stack.callback(module.register_forward_pre_hook(self._note).remove)
            with torch.no_grad(), evaluating(model), state_kept(model):
                call_model(model, example)
        self._alive.clear()

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        tensors = args[0] if args else ()
        if isinstance(tensors, Sequence) and all(isinstance(t, Tensor) for t in tensors):
            self.ranges.setdefault(id(module), []).append([_range_of(t) for t in tensors])
            self.operands.setdefault(id(module), set()).update(map(_key, tensors))

    def _note_reader(self, reader: int, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        self._alive.append(args[0])
        self.readers.setdefault(_key(args[0]), set()).add(reader)

    def read_elsewhere(self, concatenation: int) -> bool:
        """Return True if another quantizer reads a tensor of a concatenation."""
        return any(
            self.readers.get(key, set()) - {concatenation} for key in self.operands[concatenation]
        )


def _key(tensor: Tensor) -> _Key:
    return tensor.data_ptr(), tensor.numel()


def _is_float(flow: Flow, concatenation: int) -> bool:
    """Return True if something reads the result of a concatenation without quantizing it."""
    calls = [call for call in flow.calls if id(call.module) == concatenation]
    return any(_leads_to_float(flow, call) for call in calls)


def _leads_to_float(flow: Flow, call: Call) -> bool:
    if call.index in flow.outputs:
        return True
    return any(
        _leads_to_float(flow, reader)
        if moves_elements(reader) or (reader.module is None and reader.name in _PARTS)
        else not quantizes(reader)
        for reader in flow.consumers(call)
    )


def _range_of(tensor: Tensor) -> _Range:
    if not tensor.numel():
        return _Range(0.0, False)
    return _Range(float(tensor.abs().max()), bool(tensor.min() < 0))


def _is_mixed(calls: list[list[_Range]]) -> bool:
    """Return True if only some tensors of a call have negative values."""
    return _is_regular(calls) and any(len({r.is_signed for r in call}) > 1 for call in calls)


def _differ(calls: list[list[_Range]], most_unequal: float) -> bool:
    """Return True if the ranges of the tensors of a call differ too much to be shared."""
    sizes = [[found.amax for found in call] for call in calls if call]
    return _is_regular(calls) and any(max(s) > most_unequal * min(s) for s in sizes)


def _is_regular(calls: list[list[_Range]]) -> bool:
    """Return True if all calls have as many tensors."""
    return len({len(call) for call in calls}) == 1
