"""Which BatchNorm belongs to which layer, and why others do not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchq.fusion.batchnorm.passthrough import (
    border,
    does_nothing,
    inferred_rank,
    moves_features,
    paddable,
)
from torchq.fusion.modules import (
    TRANSPOSED,
    RescalesOutput,
    is_fuse_leaf,
    is_layer,
    is_norm,
    layer_obstacle,
    norm_affine,
    norm_obstacle,
    output_channels,
)
from torchq.fusion.report import Refusal
from torchq.graph import Call, Flow, flow_of_graph, record, trace

__all__ = ["Pair", "find_flow", "find_pairs"]


@dataclass(frozen=True)
class Pair:
    """A BatchNorm and the layers that absorb it: the one before it, or all those after it.

    Attributes:
        norm: path of the BatchNorm.
        layers: paths of the layers; one for ``before=False``.
        before: the BatchNorm comes before the layers.
        pads: the border has to be padded explicitly with the BatchNorm's own zero point (opt-in).
        found_by: ``"fx"`` or ``"recorder"``.
    """

    norm: str
    layers: tuple[str, ...]
    before: bool
    pads: bool
    found_by: str


class _Refused(Exception):
    """Carries the reason."""


def find_flow(model: nn.Module, example: Any) -> tuple[Flow, tuple[str, ...]]:
    """How data flows: from fx where it traces, else recorded on the example, else from those parts that fx can trace.

    Ranks of results come from the example, where there is one. The second value holds remarks for the report.
    """
    recorded = None if example is None else record(model, copy.deepcopy(example), is_fuse_leaf)
    try:
        flow = flow_of_graph(trace(model, is_fuse_leaf), model)
    except Exception as error:  # a model may fail to trace in any way it likes
        failure = f"not traceable with torch.fx ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        if recorded is not None:
            return recorded, (f"{failure}; recorded one forward pass instead",)
        return _flow_of_parts(model), (
            f"{failure}; traced its parts. Give an example to see the whole",
        )
    return (flow if recorded is None else _with_ranks(flow, recorded)), ()


def _with_ranks(flow: Flow, recorded: Flow) -> Flow:
    def rank(call: Call) -> int | None:
        ranks = (
            {known.rank for known in recorded.calls_of(call.module)}
            if call.module is not None
            else set()
        )
        return ranks.pop() if len(ranks) == 1 else None

    return replace(flow, calls=tuple(replace(call, rank=rank(call)) for call in flow.calls))


def _flow_of_parts(model: nn.Module) -> Flow:
    calls: list[Call] = []
    outputs: set[int] = set()
    read: set[int] = set()
    for prefix, flow in _traceable_parts(model, ""):
        start = len(calls)
        for call in flow.calls:
            calls.append(
                replace(
                    call,
                    index=start + call.index,
                    name=prefix + call.name,
                    inputs=tuple(start + i for i in call.inputs),
                )
            )
        outputs.update(start + index for index in flow.outputs)
        read |= flow.read
    return Flow(tuple(calls), frozenset(outputs), "fx", frozenset(read))


def _traceable_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, Flow]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        if is_fuse_leaf(child):
            continue
        try:
            flow = flow_of_graph(trace(child, is_fuse_leaf), child)
        except Exception:  # look inside instead
            yield from _traceable_parts(child, path)
        else:
            yield path, flow


def find_pairs(
    model: nn.Module, flow: Flow, *, constant_pad: bool = False
) -> tuple[list[Pair], list[Refusal]]:
    """Every BatchNorm of ``model`` as a pair or as a refusal with its reason."""
    finder = _Finder(model, flow, constant_pad)
    pairs, refusals = [], []
    for name, module in model.named_modules():
        if not is_norm(module):
            continue
        try:
            pairs.append(finder.examine(name, module))
        except _Refused as reason:
            refusals.append(Refusal(name, str(reason)))
    return pairs, refusals


def _held_in_containers(model: nn.Module) -> dict[int, str]:
    """Modules in plain lists and dicts, where a replaced module would stay, and which those are."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key != "_modules" and isinstance(value, (list, tuple, dict)):
                where = f"the {type(value).__name__} {path}{'.' if path else ''}{key}"
                items = value.values() if isinstance(value, dict) else value
                found |= {id(item): where for item in items if isinstance(item, nn.Module)}
    return found


class _Finder:
    def __init__(self, model: nn.Module, flow: Flow, constant_pad: bool) -> None:
        self.model, self.flow, self.constant_pad = model, flow, constant_pad
        self.names = {id(module): name for name, module in model.named_modules()}
        self.held = _held_in_containers(model)
        self.asked = {
            call.name.rpartition(".")[0] for call in flow.calls if call.module is None
        }  # for an attribute, by path
        self.taken: set[int] = set()

    def examine(self, name: str, norm: nn.Module) -> Pair:
        if reason := norm_obstacle(norm):
            raise _Refused(reason)
        if id(norm) in self.held:
            raise _Refused(f"is also kept in {self.held[id(norm)]}, outside the module tree")
        if id(norm) in self.flow.read or (name and name in self.asked):
            raise _Refused("has parameters that are also read outside its own forward")
        calls = self.flow.calls_of(norm)
        if not calls:
            raise _Refused(
                "is not called in the traced or recorded forward; give an example that reaches it"
            )
        try:
            layer = self._layer_before(norm, calls)
        except _Refused as reason:
            return self._pair_before(name, norm, calls, str(reason))
        return Pair(name, (self.names[id(layer)],), False, False, self.flow.origin)

    def _layer_obstacle(self, layer: nn.Module) -> str | None:
        if id(layer) in self.flow.read:
            return "has parameters that are also read outside its own forward"
        return layer_obstacle(layer)

    # -- layer, then norm ----------------------------------------------------------------------------------------------------

    def _layer_before(self, norm: Any, calls: list[Call]) -> nn.Module:
        sources = [self._source(call) for call in calls]
        layers = {id(source.module) for source in sources}
        if len(layers) > 1:
            raise _Refused(f"is shared: it follows {', '.join(source.name for source in sources)}")
        layer = sources[0].module
        assert layer is not None
        name = sources[0].name
        if len(self.flow.calls_of(layer)) != len(calls):
            raise _Refused(f"its layer {name} is shared: it is also called without this BatchNorm")
        if reason := self._layer_obstacle(layer):
            raise _Refused(f"its layer {name} {reason}")
        if output_channels(layer) != norm.running_mean.numel():
            raise _Refused(
                f"has {norm.running_mean.numel()} channels, its layer {name} {output_channels(layer)}"
            )
        if isinstance(layer, RescalesOutput) and (
            reason := layer.output_scale_obstacle(norm_affine(norm)[0])
        ):
            raise _Refused(f"its layer {name} {reason}")
        self._claim(layer, name)
        return layer

    def _claim(self, layer: nn.Module, name: str) -> None:
        if id(layer) in self.taken:
            raise _Refused(f"its layer {name} absorbs another BatchNorm; run fuse_ again")
        self.taken.add(id(layer))

    def _source(self, call: Call) -> Call:
        """The layer call whose result ``call`` normalises, through modules that do nothing in eval mode."""
        at = call
        moved: tuple[int, ...] = ()
        while True:
            if len(at.inputs) != 1:
                raise _Refused("its input does not come from one convolution or linear layer")
            source = self.flow.calls[at.inputs[0]]
            others = [other for other in self.flow.consumers(source) if other.index != at.index]
            if others and (is_layer(source.module) or does_nothing(source)):
                raise _Refused(
                    f"{source.name} has {len(others) + 1} consumers: {', '.join(c.name for c in [at, *others])}"
                )
            if source.index in self.flow.outputs and is_layer(source.module):
                raise _Refused(f"{source.name} is also an output of the model")
            if is_layer(source.module):
                self._check_linear(source, moved)
                return source
            if not (does_nothing(source) or moves_features(source)):
                raise _Refused(
                    f"its input comes from {source.name}, not from a convolution or linear layer"
                )
            moved += moves_features(source)
            at = source

    def _check_linear(self, source: Call, moved: tuple[int, ...]) -> None:
        if not isinstance(source.module, nn.Linear):
            if moved:
                raise _Refused(f"{source.name} is rearranged before it is normalised")
            return
        rank = source.rank or inferred_rank(self.flow, source)
        if rank is None:
            raise _Refused(
                f"{source.name} is linear and the dimensions of its result are unknown; give an example"
            )
        if (rank,) != (moved or (2,)):
            raise _Refused(
                f"{source.name} is linear on a {rank}-d input: its features are the last axis, BatchNorm normalises axis 1"
            )

    # -- norm, then layers ---------------------------------------------------------------------------------------------------

    def _pair_before(self, name: str, norm: Any, calls: list[Call], why_not_after: str) -> Pair:
        call = calls[0]
        followers = (
            self._followers(call)
            if len(calls) == 1 and call.index not in self.flow.outputs and not hasattr(norm, "act")
            else []
        )
        if not followers:
            raise _Refused(why_not_after)
        shift = norm_affine(norm)[1]
        zero_shift = not bool(shift.any())
        pads = False
        for follower in followers:
            layer: Any = follower.module
            reason = self._follower_obstacle(follower, norm)
            if reason is None and not zero_shift and (shifted := border(layer)):
                pads = (
                    self.constant_pad
                    and len(followers) == 1
                    and not isinstance(layer, TRANSPOSED)
                    and paddable(layer, norm)
                )
                reason = None if pads else shifted
            if reason:
                raise _Refused(f"{why_not_after}; and {follower.name} after it {reason}")
        for follower in followers:
            assert follower.module is not None
            self._claim(follower.module, follower.name)
        return Pair(
            name, tuple(follower.name for follower in followers), True, pads, self.flow.origin
        )

    def _followers(self, call: Call) -> list[Call]:
        """The layers that read ``call``, or nothing where something else reads it too."""
        found = []
        for consumer in self.flow.consumers(call):
            if does_nothing(consumer) and consumer.index not in self.flow.outputs:
                inner = self._followers(consumer)
                if not inner:
                    return []
                found += inner
            elif is_layer(consumer.module) and len(consumer.inputs) == 1:
                found.append(replace(consumer, name=self.names[id(consumer.module)]))
            else:
                return []
        return found

    def _follower_obstacle(self, follower: Call, norm: Any) -> str | None:
        layer: Any = follower.module
        if len(self.flow.calls_of(layer)) > 1:
            return "is called more than once"
        if follower.functional:
            return "is called as a function, perhaps with another padding than its own"
        if isinstance(layer, RescalesOutput):
            return "is quantized per output channel; fuse before quantizing"
        if reason := self._layer_obstacle(layer):
            return reason
        if isinstance(layer, nn.Linear):
            rank = follower.rank or inferred_rank(self.flow, follower)
            return (
                None
                if rank == 2
                else f"is linear on a {rank}-d input"
                if rank
                else "is linear on an input of unknown rank; give an example"
            )
        return (
            None
            if layer.in_channels == norm.running_mean.numel()
            else "has another number of channels"
        )
