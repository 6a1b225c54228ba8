"""The decision about one module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.nn import CallSite

__all__ = ["Decision"]


@dataclass(frozen=True)
class Decision:
    """What happens to one module.

    Attributes:
        names: Every dotted path of the module; ``("",)`` for the root.
        module: The module.
        float_class: Its class before the swap.
        rule: The pattern that decided, or None.
        input: The descriptor of its inputs, or None.
        weight: The descriptor of its weights, or None.
        reason: Why it stays float; empty where it is quantized.
        parent: None where the module stays in its place. A module without parameters that stands
            in several places gets a range in each, so there ``module`` is a copy that its
            ``parent`` adopts instead.
        layer: The class that it is quantized as, whose rules apply; None is its own.
        calls: The calls in its own forward that are quantized, where its class has no twin.
        note: What a target changed about it, for the report.
    """

    names: tuple[str, ...]
    module: nn.Module
    float_class: type[nn.Module]
    rule: str | None = None
    input: QuantDescriptor | None = None
    weight: QuantDescriptor | None = None
    reason: str = ""
    parent: nn.Module | None = None
    layer: type[nn.Module] | None = None
    calls: tuple[CallSite, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """The first dotted path."""
        return self.names[0]
