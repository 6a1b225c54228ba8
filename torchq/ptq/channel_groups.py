"""Linear layers that read one tensor, and the norm that makes the channels of this tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.graph import Call, Flow, is_torch_leaf, record
from torchq.nn import QuantModule, TensorQuantizer


@dataclass(frozen=True)
class ChannelGroup:
    """Layers that read one tensor.

    Attributes:
        layers: path and layer of each.
        source: path and module of the norm that makes the channels of the tensor and can take
            their factors, because nothing else reads it; None if there is none.
    """

    layers: tuple[tuple[str, Any], ...]
    source: tuple[str, Any] | None

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the layers."""
        return tuple(name for name, _ in self.layers)

    def modules(self) -> Iterator[Any]:
        """Yield the layers and the source."""
        yield from (layer for _, layer in self.layers)
        if self.source is not None:
            yield self.source[1]


def find_groups(model: nn.Module, example: Any) -> tuple[list[ChannelGroup], dict[str, str]]:
    """Return the groups in running order, and the layers that cannot be treated.

    The quantizers of ``model`` are off; ``example`` holds the arguments of one call.
    """
    flow = record(model, example, _is_leaf)
    skipped: dict[str, str] = {}
    chosen: dict[tuple[int, ...], list[Call]] = {}
    wanted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module, QuantModule)
    }
    reached = set()
    for call in flow.calls:
        if call.name not in wanted or call.module is not wanted[call.name]:
            continue
        reached.add(call.name)
        reason = _obstacle(model, flow, call)
        if reason is None:
            # An input of the model has no source, and its layers stay apart.
            key = call.inputs or (-1 - call.index,)
            chosen.setdefault(key, []).append(call)
        else:
            skipped[call.name] = reason
    skipped |= dict.fromkeys(wanted.keys() - reached, "the first batch did not reach it")
    groups: list[ChannelGroup] = []
    for key, calls in chosen.items():
        layers = tuple((call.name, call.module) for call in calls)
        source = _source(flow, key, calls)
        if source is not None:
            groups.append(ChannelGroup(layers, source))
        else:
            groups += [ChannelGroup((layer,), None) for layer in layers]
    return groups, skipped


def _is_leaf(module: nn.Module) -> bool:
    return is_torch_leaf(module) or isinstance(module, QuantModule) or _is_norm(module)


def _obstacle(model: nn.Module, flow: Flow, call: Call) -> str | None:
    """Return why the input channels of a layer cannot be scaled, or None."""
    layer: Any = call.module
    if not isinstance(layer.input_quantizer, TensorQuantizer):
        return "its input is not quantized"
    if len(flow.calls_of(layer)) > 1:
        return "it runs several times"
    if call.functional or id(layer) in flow.read:
        return "its weight is read by a function"
    if sum(any(p is layer.weight for p in m.parameters(False)) for m in model.modules()) > 1:
        return "it shares its weight with another module"
    quantizer = layer.input_quantizer
    holders = [m for m in model.modules() if any(c is quantizer for c in m.children())]
    return "it shares its input quantizer with another module" if len(holders) > 1 else None


def _source(flow: Flow, key: tuple[int, ...], calls: list[Call]) -> tuple[str, Any] | None:
    """Return the norm that makes the channels that exactly these calls read, or None."""
    if len(key) != 1 or key[0] < 0:
        return None
    source = flow.calls[key[0]]
    readers = {reader.index for reader in flow.consumers(source)}
    if readers != {call.index for call in calls} or source.index in flow.outputs:
        return None
    norm: Any = source.module
    if norm is None or not _is_norm(norm) or len(flow.calls_of(norm)) != 1:
        return None
    layer: Any = calls[0].module
    return (source.name, norm) if norm.weight.shape[0] == layer.weight.shape[1] else None


def _is_norm(module: nn.Module) -> bool:
    """Return True for LayerNorm and for RMSNorm, torch's or another library's."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    weight = getattr(module, "weight", None)
    return named and weight is not None and weight.dim() == 1
