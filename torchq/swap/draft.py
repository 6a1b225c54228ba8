"""A decision in the making, with its module at hand, and why some cannot be quantized at all."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from torchq.descriptor import QuantDescriptor
from torchq.nn import QUANTIZED, QuantModule, quantized_class
from torchq.nn.calls.functions import CallSite
from torchq.nn.subclasses import unparametrized
from torchq.swap.plan import ALREADY, Decision
from torchq.utils import Pattern, matches, qualified_name

_NO_TWIN = "no quantized twin of "


def no_twin(cls: type[nn.Module]) -> str:
    """Return the reason for a class with parameters that nobody registered."""
    name = qualified_name(cls)
    return (
        f"{_NO_TWIN}{name}, which has parameters of its own; pass example= to find function calls "
        f"with them, or register one with torchq.nn.register({name})"
    )


@dataclass(frozen=True)
class Draft:
    """What happens to one module; attributes as of :class:`Decision`, whose ``by`` is the ``rule``.

    Attributes:
        float_class: its class before the swap.
        parent: the module that adopts a new ``module`` for a call; None for one in its place.
        layer: the class that it is quantized as, whose rules apply; None is its own.
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
    def is_without_twin(self) -> bool:
        """True if the module stays float only because no class is registered for it."""
        return self.reason.startswith(_NO_TWIN)

    @property
    def name(self) -> str:
        """The first dotted path."""
        return self.names[0]

    def matches(self, pattern: Pattern) -> bool:
        """Return True if a pattern selects it, by its class or the one it is quantized as."""
        classes = {self.float_class, self.layer or self.float_class}
        return any(matches(pattern, self.names, self.module, cls) for cls in classes)

    def decision(self) -> Decision:
        """Return the decision without its module."""
        cls = qualified_name(unparametrized(self.float_class))
        told: Any = {"reason": self.reason, "by": self.rule or "", "note": self.note}
        return Decision(self.names, cls, self.input, self.weight, calls=self.calls, **told)


def obstacle(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Return why ``module`` cannot be swapped."""
    cls = type(module)
    if isinstance(module, QuantModule):
        return ALREADY
    if isinstance(parent, nn.MultiheadAttention) and module is parent.out_proj:
        if quantized_class(type(parent)) is not None or isinstance(parent, QuantModule):
            return None  # It is quantized as a part of its parent.
        return "its weight is read by nn.MultiheadAttention directly, its forward is never called"
    if isinstance(module, parametrize.ParametrizationList):
        return None  # It computes a tensor of its parent.
    if parametrize.is_parametrized(module) and not _reads_attributes(cls):
        return "parametrized; bake it with torch.nn.utils.parametrize.remove_parametrizations first"
    if quantized_class(cls) is not None:
        if "forward" in vars(module):
            return "forward was replaced on the instance"
        is_complex = any(p.is_complex() for p in module.parameters(recurse=False))
        return "complex dtype" if is_complex else ""
    base = next((c for c in cls.__mro__[1:] if c in QUANTIZED), None)
    name = qualified_name(cls)
    if base is not None:
        if issubclass(cls, LazyModuleMixin):
            return "not initialised yet; run one batch through the model first"
        return (
            f"a subclass of {base.__name__} with code of its own may compute something else; "
            "pass example= to find its function calls, or register a twin with "
            f"torchq.nn.register({name})"
        )
    if any(p.dim() > 1 and p.is_floating_point() for p in module.parameters(recurse=False)):
        return no_twin(cls)
    return None


def _reads_attributes(cls: type[nn.Module]) -> bool:
    """Return True if the twin of ``cls`` computes with the weights that its attributes give."""
    # Recurrent layers keep a list of their weights, which a parametrization does not change.
    return quantized_class(cls) is not None and not issubclass(cls, nn.RNNBase)
