"""Calls in forwards, and routers: these redirect operators to child modules, or note them.

See :mod:`torchq.graph.source` for how a forward is rewritten. The name of an operator starts with
``@`` and tells where in the code it is: ``@3`` is the fourth site of the forward, ``@3#1`` its
second visit in one call (a loop), ``@5.2`` the third site of a function called at the sixth.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.graph import (
    OPERATORS,
    Operator,
    address_of,
    floats_in,
    operator_of,
    overwrites,
    tensors_in,
)
from torchq.nn.calls.overwrites import Overwrites
from torchq.nn.modules.operators import OPERATORS as STAND_INS

#: The first character of the names of sites; those of nodes of a graph do not have it.
MARK = "@"

_MATRIX_DIMS = 2


@dataclass(frozen=True)
class Visit:
    """An operator that a forward carried out: its place, the word of its row, operands, result."""

    name: str
    kind: str
    operands: tuple[Any, ...] | None
    result: Any
    is_in_place: bool = False


class Recorder:
    """Where the calls of a module note their operators.

    Attributes:
        visits: the operators that a module can stand for, in the order of calls.
        places: the places in the code that were reached.
        without_ranges: the names of the sites with operands that no quantizer could read.
        current: the name of the site that is carried out now; "" for none.
        overwrites: what watches the memory that operators overwrite, or None.
    """

    def __init__(self, overwrites: Overwrites | None = None) -> None:
        self.visits: list[Visit] = []
        self.places: set[str] = set()
        self.without_ranges: set[str] = set()
        self.current = ""
        self.overwrites = overwrites

    def run(
        self,
        name: str,
        function: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        """Carry out a function or method and note it."""
        self.places.add(place_of(name))
        row = operator_of(function)
        is_candidate = row is not None and bool(row.module)
        # What is looked at afterwards would count as read again.
        is_noted = is_candidate and have_ranges((args, kwargs))
        if is_candidate and not is_noted:
            self.without_ranges.add(name)
        self.current = name
        try:
            result = carry_out(function, args, kwargs)
        finally:
            self.current = ""
        is_in_place = overwrites(function, kwargs)
        if self.overwrites is not None and is_in_place and isinstance(result, Tensor):
            result = self.overwrites.handed_on(result, (id(self), name))
        if row is not None and is_noted:
            operands = row.operands(args, kwargs)
            self.visits.append(Visit(name, row.word, operands, result, is_in_place))
        return result


def have_memory(arguments: object) -> bool:
    """Return True if quantizers can read all tensors: none is sparse or inside ``torch.vmap``."""
    return all(address_of(tensor) is not None for tensor in tensors_in(arguments))


def have_ranges(arguments: object) -> bool:
    """Return True if quantizers can read all tensors, and none holds infinity, as masks do."""
    return have_memory(arguments) and not any(
        bool(tensor.isinf().any()) for tensor in floats_in(arguments)
    )


def carry_out(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, or the method of the first argument that a string names."""
    if isinstance(function, str):
        return getattr(args[0], function)(*args[1:], **kwargs)
    return function(*args, **kwargs)


def place_of(name: str) -> str:
    """Return the name of a site without numbers of visits: where it is in the code."""
    return ".".join(part.partition("#")[0] for part in name.split("."))


def visits_of(name: str) -> tuple[int, ...]:
    """Return the numbers of visits in the name of a site."""
    return tuple(int(part.partition("#")[2] or 0) for part in name.split("."))


class Route:
    """The router of one call of a module's forward, or of a function in it."""

    __slots__ = ("_owner", "_path", "_place", "_routes", "_visits")

    def __init__(self, owner: Any, path: str = MARK, place: str = MARK) -> None:
        self._owner = owner
        self._routes = owner.torchq_routes
        self._path, self._place = path, place
        self._visits: dict[str, int] = {}

    def follow(
        self,
        site: str,
        callee: Callable[..., object],
        known: Callable[..., object],
        new: Callable[..., object],
        /,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Call ``new``, with a router of its own, where ``callee`` is the function ``known``.

        What a name stands for may differ by object and time: any other function runs as it is.
        """
        is_method = isinstance(callee, types.MethodType)
        if (callee.__func__ if is_method else callee) is not known:  # type: ignore[attr-defined]
            return callee(*args, **kwargs)
        if is_method:
            args = (callee.__self__, *args)  # type: ignore[attr-defined]
        inner = Route(self._owner, f"{self._name(site)}.", f"{self._place}{site}.")
        return new(*args, **kwargs, __torchq_route__=inner)

    def binary(self, site: str, name: str, first: object, second: object, /) -> Any:
        """Carry out ``operator.<name>(first, second)``, or call the child for it."""
        return self._run(site, getattr(operator, name), (first, second), {})

    def call(
        self,
        site: str,
        function: Callable[..., object],
        /,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Carry out ``function(*args, **kwargs)``, or call the child for it."""
        return self._run(site, function, args, kwargs)

    def method(
        self, site: str, name: str, owner: object, /, *args: object, **kwargs: object
    ) -> Any:
        """Carry out ``owner.<name>(*args, **kwargs)``, or call the child for it."""
        return self._run(site, name, (owner, *args), kwargs)

    def own(self, how: str) -> Any:
        """Return the children of the module without those that stand for operators."""
        children = self._routes.children(self._owner)
        return list(children.items() if how == "named_children" else children.values())

    def _run(
        self,
        site: str,
        function: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        routes = self._routes
        if routes.recorder is not None:
            return routes.recorder.run(self._name(site), function, args, kwargs)
        if self._place + site not in routes.watched:
            return carry_out(function, args, kwargs)
        return routes.run(self._owner, self._name(site), function, args, kwargs)

    def _name(self, site: str) -> str:
        place = self._path + site
        if site.endswith("f"):  # a nested function, which checkpointing may run again
            return place
        number = self._visits.get(site, 0)
        self._visits[site] = number + 1
        return f"{place}#{number}" if number else place


# --- calls with weights -------------------------------------------------------------------------

_PRODUCTS = {
    row.word: row for row in map(OPERATORS.__getitem__, OPERATORS) if row.layer
}


@dataclass(frozen=True)
class CallSite:
    """One call in the forward of a module.

    Attributes:
        kind: The :attr:`torchq.graph.Operator.word` of the called function.
        weight: The path of the parameter that is the weight, seen from the module; "" for none.
        holder: The path of the child whose quantizers are used; "" is the module itself.
        weight_is_left: True where the weight is the left operand of a symmetric function.
        site: Where it is in the code; see above.
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
            raise ConfigError(
                f"call site: got {dict(data)}; expected the fields {expected}"
            )
        for path in (data["weight"], data["holder"]):
            if path and not all(
                name.isidentifier() or name.isdigit() for name in path.split(".")
            ):
                raise ConfigError(
                    f"call site: got the path {path!r}; expected names and dots"
                )
        return cls(**data)


def product_of(
    func: Callable[..., object], args: tuple[object, ...]
) -> Operator | None:
    """Return the row of a product with a weight; None for others, and for einsum of not two."""
    row = operator_of(func)
    if row is None or not row.layer or (row.name == "einsum" and len(args) != 3):
        return None
    return row


def equivalent_class(kind: str) -> type[nn.Module]:
    """Return the float class whose rules apply to calls of ``kind``."""
    name = _PRODUCTS[kind].layer
    layer: type[nn.Module] = STAND_INS[name] if name in STAND_INS else getattr(nn, name)
    return layer


def operand(
    args: tuple[object, ...], kwargs: Mapping[str, object], place: tuple[int, str]
) -> Any:
    """Return the argument at a position or under a keyword, or None."""
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def with_operands(
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    changed: Mapping[tuple[int, str], object],
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
    site: CallSite,
    weight_ndim: int,
    input: QuantDescriptor | None,
    weight: QuantDescriptor | None,
) -> tuple[QuantDescriptor | None, QuantDescriptor | None]:
    """Return the descriptors of a rule for layers, adapted to the layout of a call.

    The axis of the output channels differs, and blocks follow the axis that is summed over. A
    weight has one scale where that may be any axis (einsum, tensordot), and with quantized inputs
    where it is several matrices: QuantizeLinear of ONNX has one axis, and ONNX Runtime reads no
    vector of scales for them.
    """
    outputs = _PRODUCTS[site.kind].outputs
    if outputs == "first":
        return input, weight
    if outputs == "any":
        if weight is not None and weight.block_size is None and weight.axis is not None:
            weight = weight.replace(axis=None, name=None)
        return input, weight
    if (
        weight is not None
        and weight.axis == (0,)
        and input is not None
        and weight_ndim > _MATRIX_DIMS
    ):
        weight = weight.replace(axis=None, name=None)
    if site.weight_is_left:
        if (
            input is not None
            and input.block_size is not None
            and input.block_axis == -1
        ):
            input = input.replace(block_axis=-2)
        if weight is not None and weight.axis == (0,):
            weight = weight.replace(axis=tuple(range(weight_ndim - 1)))
        return input, weight
    if weight is not None and weight.block_size is not None and weight.block_axis == -1:
        weight = weight.replace(block_axis=-2)
    elif weight is not None and weight.axis == (0,):
        axes = (*range(weight_ndim - 2), weight_ndim - 1)
        weight = weight.replace(axis=axes)
    return input, weight
