"""Ranges of concatenated tensors: one for all of them, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from torchq.graph import Call, Flow, call_model, record
from torchq.nn import QuantCat, TensorQuantizer
from torchq.swap.flow.calls import is_leaf, moves_elements, quantizes
from torchq.swap.flow.float_runs import computing_in_float

#: The address of a tensor's elements, and their number. Views of all of them have the same key.
_Key: TypeAlias = tuple[int, int]
#: Functions that return parts of a tensor.
_PARTS = frozenset(["chunk", "split", "tensor_split", "getitem", "__getitem__"])


@dataclass(frozen=True)
class _Range:
    """What a tensor of a concatenation holds: its largest magnitude, and negative values or not."""

    amax: float
    is_signed: bool


def separate_ranges_(model: nn.Module, example: Any, most_unequal: float) -> list[str]:
    """Give each tensor of a concatenation its own range where that gains something, in place.

    A tensor whose own range is a third of the shared one is left with a third of the codes. So are
    the other layers that read it, so a chain of layers whose results are concatenated, as in
    HGNetV2, gains most from own ranges. Where nothing else reads the tensors, and all that reads
    the result quantizes it with one range, as in GoogLeNet and ShuffleNet, nothing is gained.

    Codes that begin at 0 include the ReLU in front of them. If only some of the tensors have
    negative values, a shared range leaves the ReLU in front of the others, and the convolution
    before it, in float.

    Before: the tensors of each quantized concatenation have one range. After: they have one each
    where, on the example, only some of them have negative values, or where the ratio of their
    ranges is above ``most_unequal`` and another quantizer reads one of them, or a function or
    module reads the result in float.
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
        readers: tensor -> the ids of what reads it: of concatenations for their own quantizers,
            and of all other quantizers.
    """

    ranges: dict[int, list[list[_Range]]] = field(default_factory=dict)
    operands: dict[int, set[_Key]] = field(default_factory=dict)
    readers: dict[_Key, set[int]] = field(default_factory=dict)
    # Tensors that are kept during the run, so that no two have one address.
    _alive: list[Tensor] = field(default_factory=list)

    def run(self, model: nn.Module, example: Any, concatenations: Sequence[QuantCat]) -> None:
        """Run a model with all quantizers off, and note what its concatenations read."""
        owners = {id(q): id(cat) for cat in concatenations for q in cat.modules()}
        with ExitStack() as stack:
            for quantizer in model.modules():
                if isinstance(quantizer, TensorQuantizer):
                    note = partial(self._note_reader, owners.get(id(quantizer), id(quantizer)))
                    stack.callback(quantizer.register_forward_pre_hook(note).remove)
            for module in concatenations:
                stack.callback(module.register_forward_pre_hook(self._note).remove)
            stack.enter_context(computing_in_float(model))
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
    """Return True if a result, or a part of it, is returned by the model or read in float."""
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
