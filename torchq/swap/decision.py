"""The decision about one module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.nn import CallSite
from torchq.utils import qualified_name

_NO_TWIN = "no quantized twin of "
#: The start of the note about a layer whose weight alone is quantized, because of the target.
FLOAT_INPUT = "its input stays float"


def no_twin(cls: type[nn.Module]) -> str:
    """Return the reason for a class with parameters that nobody registered."""
    name = qualified_name(cls)
    return (
        f"{_NO_TWIN}{name}, which has parameters of its own; pass example= to find function calls "
        f"with them, or register one with torchq.nn.register({name})"
    )


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
        note: What else there is to know about it, for the report.
        output: The descriptor of its result, or None.
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
    output: QuantDescriptor | None = None

    @property
    def is_without_twin(self) -> bool:
        """True if the module stays float only because no class is registered for it."""
        return self.reason.startswith(_NO_TWIN)

    @property
    def has_float_input(self) -> bool:
        """True if a target leaves the input of the module float, so that it computes in float."""
        return self.note.startswith(FLOAT_INPUT)

    @property
    def name(self) -> str:
        """The first dotted path."""
        return self.names[0]
