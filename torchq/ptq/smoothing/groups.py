"""Linear layers that read one tensor, and the norm that can take factors from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.graph import Call, Flow, is_torch_leaf, record
from torchq.nn import QuantModule, TensorQuantizer

__all__ = ["SmoothingGroup", "find_groups"]


@dataclass(frozen=True)
class SmoothingGroup:
    """Layers that read one tensor.

    Attributes:
        layers: path and layer of each.
        norm: path and module of the norm that makes the tensor, if only these layers read it.
    """

    layers: tuple[tuple[str, Any], ...]
    norm: tuple[str, Any] | None

    def modules(self) -> Iterator[Any]:
        """Yield the layers and the norm."""
        yield from (layer for _, layer in self.layers)
        if self.norm is not None:
            yield self.norm[1]


def find_groups(model: nn.Module, example: Any) -> tuple[list[SmoothingGroup], dict[str, str]]:
    """Return the groups in running order, and the Linear layers that cannot be smoothed.

    Args:
        model: a quantized model whose quantizers are off.
        example: the arguments of one call.
    """
    flow = record(model, example, _is_leaf)
    groups: list[SmoothingGroup] = []
    skipped: dict[str, str] = {}
    chosen: dict[tuple[int, ...], list[Call]] = {}
    reached = set()
    for call in flow.calls:
        if not isinstance(call.module, nn.Linear) or not isinstance(call.module, QuantModule):
            continue
        reached.add(call.name)
        reason = _obstacle(model, flow, call)
        if reason is None:
            # An input of the model has no source, and its layers stay apart.
            key = call.inputs or (-1 - call.index,)
            chosen.setdefault(key, []).append(call)
        else:
            skipped[call.name] = reason
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and isinstance(module, QuantModule)
            and name not in reached
        ):
            skipped[name] = "the first batch did not reach it"
    for key, calls in chosen.items():
        layers = tuple((call.name, call.module) for call in calls)
        norm = _norm_before(model, flow, key, calls)
        if norm is not None:
            groups.append(SmoothingGroup(layers, norm))
        else:
            groups += [SmoothingGroup((layer,), None) for layer in layers]
    return groups, skipped


def _is_norm(module: nn.Module) -> bool:
    """Return True for LayerNorm and for RMSNorm, torch's or another library's."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    weight = getattr(module, "weight", None)
    return named and weight is not None and weight.dim() == 1


def _is_leaf(module: nn.Module) -> bool:
    return is_torch_leaf(module) or isinstance(module, QuantModule) or _is_norm(module)


def _obstacle(model: nn.Module, flow: Flow, call: Call) -> str | None:
    """Return why the input channels of a Linear cannot be scaled, or None."""
    layer: Any = call.module
    if not isinstance(layer.input_quantizer, TensorQuantizer):
        return "its input is not quantized"
    if len(flow.calls_of(layer)) > 1:
        return "it runs several times"
    if call.functional or id(layer) in flow.read:
        return "its weight is read by a function"
    sharing = [m for m in model.modules() if any(p is layer.weight for p in m.parameters(False))]
    if len(sharing) > 1:
        return "it shares its weight with another module"
    holders = [m for m in model.modules() if any(c is layer.input_quantizer for c in m.children())]
    return "it shares its input quantizer with another module" if len(holders) > 1 else None


def _norm_before(
    model: nn.Module, flow: Flow, key: tuple[int, ...], calls: list[Call]
) -> tuple[str, Any] | None:
    """Return the norm whose output exactly these calls read, or None."""
    if len(key) != 1 or key[0] < 0:
        return None
    source = flow.calls[key[0]]
    if source.module is None or not _is_norm(source.module) or source.index in flow.outputs:
        return None
    readers = {reader.index for reader in flow.consumers(source)}
    runs_once = len(flow.calls_of(source.module)) == 1
    fits = source.module.weight.shape[0] == calls[0].module.weight.shape[1]  # type: ignore
    if readers != {call.index for call in calls} or not runs_once or not fits:
        return None
    return source.name, source.module
