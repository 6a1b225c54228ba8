"""The functions whose calls can be quantized, and the sites in a forward where they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.graph import OPERATORS, Operator, operator_of
from torchq.nn.modules.operators import OPERATORS as STAND_INS

_PRODUCTS = {row.word: row for row in map(OPERATORS.__getitem__, OPERATORS) if row.layer}


@dataclass(frozen=True)
class CallSite:
    """One call in the forward of a module.

    Attributes:
        kind: The :attr:`torchq.graph.Operator.word` of the called function.
        weight: The path of the parameter that is the weight, seen from the module; "" for none.
        holder: The path of the child whose quantizers are used; "" is the module itself.
        weight_is_left: True where the weight is the left operand of a symmetric function.
        site: Where it is in the code; see :mod:`torchq.nn.calls.routes`.
        is_unseen: True for a call that no run has shown, so that making it is an error.
    """

    kind: str
    weight: str = ""
    holder: str = ""
    weight_is_left: bool = False
    site: str = ""
    is_unseen: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CallSite:
        """Return the site that :meth:`to_dict` described."""
        expected = {name: type(value) for name, value in asdict(cls("linear")).items()}
        types = {name: type(value) for name, value in data.items()}
        if types != expected or data["kind"] not in _PRODUCTS:
            raise ConfigError(f"call site: got {dict(data)}; expected the fields {expected}")
        for path in (data["weight"], data["holder"]):
            if path and not all(name.isidentifier() or name.isdigit() for name in path.split(".")):
                raise ConfigError(f"call site: got the path {path!r}; expected names and dots")
        return cls(**data)


def product_of(func: Callable[..., Any], args: tuple[Any, ...]) -> Operator | None:
    """Return the row of a product with a weight; None for others, and for einsum of not two."""
    row = operator_of(func)
    if row is None or not row.layer or (row.name == "einsum" and len(args) != 3):
        return None
    return row


def equivalent_class(kind: str) -> type[nn.Module]:
    """Return the float class whose rules apply to calls of ``kind``."""
    name = _PRODUCTS[kind].layer
    found: type[nn.Module] = STAND_INS[name] if name in STAND_INS else getattr(nn, name)
    return found


def operand(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: tuple[int, str]) -> Any:
    """Return the argument at a position or under a keyword, or None."""
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def with_operands(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Mapping[tuple[int, str], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with some of them replaced, given by position and keyword."""
    new, named = list(args), dict(kwargs)
    for (position, name), value in changed.items():
        if position < len(new):
            new[position] = value
        else:
            named[name] = value
    return tuple(new), named


def site_descriptors(
    site: CallSite, weight_ndim: int, input: QuantDescriptor | None, weight: QuantDescriptor | None
) -> tuple[QuantDescriptor | None, QuantDescriptor | None]:
    """Return the descriptors of a rule for layers, adapted to the layout of a call.

    The axis of the output channels differs, and blocks follow the axis that is summed over. Where
    that may be any axis (einsum, tensordot) the weight has one scale.
    """
    outputs = _PRODUCTS[site.kind].outputs
    if outputs == "any":
        if weight is not None and weight.block_size is None and weight.axis is not None:
            weight = weight.replace(axis=None, name=None)
        return input, weight
    if outputs == "first":
        return input, weight
    if site.weight_is_left:
        if input is not None and input.block_size is not None and input.block_axis == -1:
            input = input.replace(block_axis=-2)
        if weight is not None and weight.axis == (0,):
            weight = weight.replace(axis=tuple(range(weight_ndim - 1)))
        return input, weight
    if weight is not None and weight.block_size is not None and weight.block_axis == -1:
        weight = weight.replace(block_axis=-2)
    elif weight is not None and weight.axis == (0,):
        kept = (*range(weight_ndim - 2), weight_ndim - 1)
        weight = weight.replace(axis=kept)
    return input, weight
