"""The functions whose calls can be quantized, and the sites in a forward where they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.graph import OPERATORS, Operator, SourceSite, operator_of
from torchq.nn.calls.routes import MARK, place_of
from torchq.nn.modules.operators import OPERATORS as STAND_INS
from torchq.utils import qualified_name

_PRODUCTS = {row.word: row for row in map(OPERATORS.__getitem__, OPERATORS) if row.layer}


@dataclass(frozen=True)
class CallSite:
    """One call in the forward of a module.

    Attributes:
        kind: The :attr:`torchq.graph.Operator.word` of the called function.
        weight: The path of the parameter that is the weight, seen from the module; "" for none.
        holder: The path of the child whose quantizers are used; "" is the module itself.
        weight_is_left: True where the weight is the left operand of a symmetric function.
        site: Where it is in the code (:mod:`torchq.nn.calls.routes`); :func:`located` finds the
            place for files of torchq 0.2, which have another text or none.
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
        """Return the site that :meth:`to_dict` described, here or in torchq 0.2."""
        counted = {"number", "total"}
        if counted <= set(data) and all(type(data[name]) is int for name in counted):
            new = {name: value for name, value in data.items() if name not in counted}
            new |= {"site": f"{data['number']} of {data['total']}", "is_unseen": False}
            return cls.from_dict(new)
        expected = {name: type(value) for name, value in asdict(cls("linear")).items()}
        types = {name: type(value) for name, value in data.items()}
        if types != expected or data["kind"] not in _PRODUCTS:
            raise ConfigError(f"call site: got {dict(data)}; expected the fields {expected}")
        for path in (data["weight"], data["holder"]):
            if path and not all(name.isidentifier() or name.isdigit() for name in path.split(".")):
                raise ConfigError(f"call site: got the path {path!r}; expected names and dots")
        return cls(**data)


def located(
    cls: type[nn.Module], call: CallSite, sites: Sequence[SourceSite]
) -> Iterator[CallSite]:
    """Yield a call at its places in the code of a forward, which has these sites.

    A call of torchq 0.2 is at every site with its weight, or at the one that may be meant.
    QuantizationError says that the code has no such call, or several.
    """
    same = [site for site in sites if OPERATORS[site.operator].word == call.kind]
    if call.site.startswith(MARK):
        if all(place_of(call.site) != MARK + site.name for site in same):
            text = f"{qualified_name(cls)}: its forward has no call of {call.kind} at {call.site}; "
            text += "expected the code that was quantized"
            raise QuantizationError(text)
        yield call
        return
    found = [site for site in same if call.weight and call.weight in (site.left, site.right)]
    if not found and len(same) == 1:
        found = same
    if not found:
        raise QuantizationError(
            f"{qualified_name(cls)}: got a call of {call.kind} without its place in the code, "
            f"which may be any of {len(same)}; expected one, or its weight among its arguments. "
            "Files of torchq 0.2 hold no places: quantize the model again with example=, and load "
            "the ranges with load_state_dict"
        )
    for site in found:
        yield replace(call, site=MARK + site.name)


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
