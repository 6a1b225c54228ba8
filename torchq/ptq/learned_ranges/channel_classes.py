"""Channels that can take one positive factor: those that additions and copies make one.

If nothing but positively homogeneous functions, additions, slices and zero padding lies between
layers, each channel can be divided by a factor where layers make it and multiplied by the same
factor where layers read it. In a residual network all layers that add to one stream make its
channels together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torchq.graph import Call, Flow
from torchq.nn import Add
from torchq.ptq.channels import LAYERS, input_ranges, output_ranges
from torchq.ptq.homogeneous import keeps_factors
from torchq.ptq.smoothing.sources import takes_factors

__all__ = ["ChannelClasses", "LayerChannels", "find_classes"]

_ADDITIONS = frozenset(["add", "add_", "__add__", "__iadd__", "iadd"])
_SLICES = frozenset(["getitem", "__getitem__"])
_ALL = slice(None)


@dataclass(frozen=True)
class LayerChannels:
    """The classes of the channels of one layer; -1 is a channel that keeps the factor 1.

    Attributes:
        module: the layer.
        reads: one class of each input channel.
        makes: one class of each output channel.
    """

    module: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class ChannelClasses:
    """The classes of all channels.

    Attributes:
        count: how many classes there are.
        layers: path of a layer -> the classes of its channels.
    """

    count: int
    layers: Mapping[str, LayerChannels]


def find_classes(
    model: nn.Module,
    flow: Flow,
    wanted: Iterable[nn.Module],
    fixed: Iterable[nn.Module] = (),
) -> ChannelClasses:
    """Return the classes of channels of a model.

    Args:
        model: in float.
        flow: of one run of it.
        wanted: layers; a channel that none of them reads keeps the factor 1.
        fixed: layers that stay as they are.
    """
    found = _Search(model, flow, {id(module) for module in fixed})
    for call in flow.calls:
        found.pass_through(call)
    for index in flow.outputs:
        found.pin(found.values.get(index))
    return found.classes({id(module) for module in wanted})


@dataclass(frozen=True)
class _Value:
    """The channels of a tensor, and its dimension that they are."""

    channels: Sequence[int]
    dim: Literal["second", "last"]


class _Search:
    """A walk over the calls; channels that must have equal factors are joined."""

    def __init__(self, model: nn.Module, flow: Flow, fixed: set[int]) -> None:
        self._model, self._flow, self._fixed = model, flow, fixed
        self._parents: list[int] = [0]  # channel 0 stands for all that keep the factor 1
        self.values: dict[int, _Value] = {}
        self._layers: dict[str, tuple[Any, Sequence[int], Sequence[int]]] = {}

    def pass_through(self, call: Call) -> None:
        """Give the result of a call its channels, or pin those of what it reads."""
        inputs = [self.values.get(index) for index in call.inputs]
        value = self._layer(call, inputs) or self._result(call, inputs)
        if value is not None:
            self.values[call.index] = value
            return
        for one in inputs:
            self.pin(one)

    def pin(self, value: _Value | None) -> None:
        """Let the channels of a tensor keep the factor 1."""
        for channel in value.channels if value is not None else ():
            self._join(channel, 0)

    def classes(self, wanted: set[int]) -> ChannelClasses:
        """Return what was found, for channels that the layers with these ids read."""
        used = {
            self._root(channel)
            for module, reads, _ in self._layers.values()
            if id(module) in wanted
            for channel in reads
        }
        numbers = {root: number for number, root in enumerate(sorted(used - {0}))}

        def named(channels: Sequence[int]) -> tuple[int, ...]:
            return tuple(numbers.get(self._root(channel), -1) for channel in channels)

        layers = {
            name: LayerChannels(module, named(reads), named(makes))
            for name, (module, reads, makes) in self._layers.items()
        }
        return ChannelClasses(len(numbers), layers)

    def _root(self, channel: int) -> int:
        while self._parents[channel] != channel:
            self._parents[channel] = self._parents[self._parents[channel]]
            channel = self._parents[channel]
        return channel

    def _join(self, one: int, other: int) -> None:
        low, high = sorted((self._root(one), self._root(other)))
        self._parents[high] = low

    def _new(self, count: int) -> list[int]:
        start = len(self._parents)
        self._parents.extend(range(start, start + count))
        return list(range(start, start + count))

    def _layer(self, call: Call, inputs: list[_Value | None]) -> _Value | None:
        """Note a layer; return its output, or None for another call."""
        module = call.module
        if not isinstance(module, LAYERS) or id(module) in self._fixed:
            return None
        if takes_factors(self._model, self._flow, call) is not None:
            return None
        dim: Literal["second", "last"] = "last" if isinstance(module, nn.Linear) else "second"
        count = len(input_ranges(module))
        value = inputs[0] if len(inputs) == 1 else None
        if value is None or value.dim != dim or len(value.channels) != count:
            for one in inputs:
                self.pin(one)
            value = _Value([0] * count, dim)
        made = self._new(len(output_ranges(module)))
        self._layers[call.name] = module, value.channels, made
        return _Value(made, dim)

    def _result(self, call: Call, inputs: list[_Value | None]) -> _Value | None:
        """Return the result of a function that keeps or moves channels; None for others."""
        first = inputs[0] if inputs else None
        if first is None:
            return None
        if len(inputs) == 2:
            return self._sum(call, first, inputs[1])
        if len(inputs) > 2:
            return None
        if keeps_factors(call, first.dim == "second"):
            return first
        return self._moved(call, first) if first.dim == "second" else None

    def _sum(self, call: Call, first: _Value, second: _Value | None) -> _Value | None:
        is_sum = call.name in _ADDITIONS if call.module is None else type(call.module) is Add
        if not is_sum or second is None or second.dim != first.dim:
            return None
        if len(first.channels) != len(second.channels):
            return None
        for one, other in zip(first.channels, second.channels, strict=True):
            self._join(one, other)
        return first

    def _moved(self, call: Call, value: _Value) -> _Value | None:
        """Return slices, padding and means of images."""
        if isinstance(call.module, nn.Flatten) or call.name == "flatten":
            return _Value(value.channels, "last")
        argument = call.arguments[0] if len(call.arguments) == 1 else None
        if not isinstance(argument, (tuple, list)) or call.module is not None:
            return None
        if call.name in _SLICES and list(argument[:2]) == [_ALL, _ALL] and _are_slices(argument):
            return value
        if call.name == "mean" and call.ndim == 2 and sorted(d % 4 for d in argument) == [2, 3]:
            return _Value(value.channels, "last")
        if call.name == "pad" and call.ndim == 4 and len(argument) in (2, 4, 6):
            before, after = argument[4:6] if len(argument) == 6 else (0, 0)
            if min(before, after) >= 0:
                return _Value([*self._new(before), *value.channels, *self._new(after)], "second")
        return None


def _are_slices(argument: Sequence[Any]) -> bool:
    return all(isinstance(part, slice) for part in argument)
