"""What is switched together: a layer, its input, its weight, or what patterns select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.analysis.layers import QuantizedLayer
from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer
from torchq.utils import Pattern, pattern_text
from torchq.workflow import select_quantizers

__all__ = ["Group", "Scope", "find_groups"]

#: Names of scopes, or the patterns of groups.
Scope = str | Mapping[str, Any] | Sequence[Pattern]


@dataclass(frozen=True)
class Group:
    """Quantizers that are switched together.

    Attributes:
        name: the path of the layer, or what the user called the group.
        layers: paths of the layers that it belongs to.
        quantizers: path -> quantizer.
    """

    name: str
    layers: tuple[str, ...]
    quantizers: dict[str, TensorQuantizer]


def find_groups(model: nn.Module, layers: list[QuantizedLayer], scope: Scope) -> list[Group]:
    """Return the groups of a scope, in the order of the layers.

    Args:
        model: the quantized model.
        layers: its layers.
        scope: see :func:`torchq.sensitivity`.

    Raises:
        ConfigError: The scope is unknown, or a pattern selects nothing that is on.
    """
    if isinstance(scope, str):
        chosen = {"layer": "quantizers", "input": "inputs", "weight": "weights"}.get(scope)
        if chosen is None:
            raise ConfigError(
                f"sensitivity: got scope {scope!r}; expected 'layer', 'input', 'weight', a mapping "
                "of names to patterns, or a list of patterns"
            )
        found = [Group(a.name, (a.name,), getattr(a, chosen)) for a in layers]
        return [group for group in found if group.quantizers]
    if isinstance(scope, Mapping):
        patterns = dict(scope)
    else:
        patterns = {pattern_text(pattern): pattern for pattern in scope}
    return [_selected(model, layers, name, chosen) for name, chosen in patterns.items()]


def _selected(model: nn.Module, layers: list[QuantizedLayer], name: str, patterns: Any) -> Group:
    found = select_quantizers(model, patterns)
    active = {path: q for path, q in found.items() if q.quantizing}
    if not active:
        raise ConfigError(
            f"sensitivity: group {name!r} selects quantizers that are all off; expected one that "
            "is on"
        )
    ids = {id(q) for q in active.values()}
    owners = [a.name for a in layers if ids & {id(q) for q in a.quantizers.values()}]
    return Group(name, tuple(owners), active)
