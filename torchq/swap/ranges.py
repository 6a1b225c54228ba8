"""What a run on an example decides about ranges: which tensors share one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.formats import PerTensor
from torchq.graph import Call, Flow, call_model, effects_of, operator_name, record
from torchq.nn import QuantCat, QuantModule, TensorQuantizer, share_quantizers_
from torchq.swap.flow import computing_in_float, is_leaf, moves_elements, quantizes

#: The address of a tensor's elements, and their number. Views of all of them have the same key.
_Key: TypeAlias = tuple[int, int]


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
        if moves_elements(reader) or (reader.module is None and "part" in effects_of(reader.name))
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


def share_common_ranges_(model: nn.Module, example: Any) -> list[list[str]]:
    """Let quantizers of one tensor be one, also across max pooling and reshapes, in place.

    All inputs of a concatenation have one range, so whatever else reads these tensors gets that
    range too: a layer whose result is quantized with two scales would stay float.

    Before: each place has a quantizer of its own. After: places that read the same values have
    the same quantizer, if their descriptors and modes are equal.
    """
    paths: dict[int, str] = {}
    of_weights: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, QuantModule):
            of_weights |= {id(q) for q, _ in module.quantized_weights()}
        if isinstance(module, TensorQuantizer):
            paths[id(module)] = path
    chosen = {key: path for key, path in paths.items() if key not in of_weights}
    flow = _ValueFlow()
    with ExitStack() as stack:
        for module in model.modules():
            if id(module) in chosen:
                stack.callback(module.register_forward_pre_hook(flow.note).remove)
        stack.enter_context(computing_in_float(model))
        with flow:
            call_model(model, example)
    return [_share_(model, group, chosen) for group in flow.groups() if len(group) > 1]


def _share_(model: nn.Module, group: list[TensorQuantizer], paths: dict[int, str]) -> list[str]:
    first = group[0].descriptor.replace(name=None)
    alike = [
        paths[id(q)]
        for q in group
        if q.descriptor.replace(name=None) == first and q.mode == group[0].mode
    ]
    if len(alike) > 1 and first.granularity == PerTensor():
        share_quantizers_(model, alike)
    return alike


class _ValueFlow(TorchFunctionMode):
    """Notes which quantizers see the same values, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._origin: dict[int, int] = {}
        # An id is unique while its tensor lives; the copy shows changes in place.
        self._alive: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, list[TensorQuantizer]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry out ``func``; the result of one that moves values has the origin of its input."""
        out = func(*args, **(kwargs or {}))
        moves = not {"move", "max"}.isdisjoint(effects_of(operator_name(func)))
        if moves and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            origin = self._root(args[0])
            if self._known(out) is None:
                self._keep(out)
                self._origin[id(out)] = origin
        return out

    def _known(self, tensor: Tensor) -> Tensor | None:
        kept = self._alive.get(id(tensor))
        return None if kept is None or not torch.equal(kept[1], tensor) else tensor

    def _keep(self, tensor: Tensor) -> None:
        self._alive[id(tensor)] = (tensor, tensor.clone())

    def _root(self, tensor: Tensor) -> int:
        if self._known(tensor) is None:
            self._keep(tensor)
            self._origin[id(tensor)] = len(self._seen)
            self._seen[len(self._seen)] = []
        return self._origin[id(tensor)]

    def note(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        """Enter a quantizer that is called on ``args[0]``; a forward pre-hook."""
        users = self._seen[self._root(args[0])]
        if isinstance(quantizer, TensorQuantizer) and all(user is not quantizer for user in users):
            users.append(quantizer)

    def groups(self) -> list[list[TensorQuantizer]]:
        """Return quantizers that see the same values; one that sees several tensors joins them."""
        groups: list[list[TensorQuantizer]] = []
        for users in self._seen.values():
            touching = [g for g in groups if any(a is b for a in g for b in users)]
            merged = [q for g in touching for q in g]
            merged += [q for q in users if all(q is not other for other in merged)]
            groups = [g for g in groups if all(g is not other for other in touching)] + [merged]
        return groups
