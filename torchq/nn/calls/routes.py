"""Routers: they redirect the operators of a rewritten forward to child modules, or note them.

See :mod:`torchq.graph.source` for how a forward is rewritten. The name of an operator starts with
``@`` and tells where in the code it is: ``@3`` is the fourth site of the forward, ``@3#1`` its
second visit in one call (a loop), ``@5.2`` the third site of a function called at the sixth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.graph import operator_of

#: The first character of the names of sites; those of nodes of a graph do not have it.
MARK = "@"


@dataclass(frozen=True)
class Visit:
    """An operator that a forward carried out: its place, the word of its row, operands, result."""

    name: str
    kind: str
    operands: tuple[Any, ...] | None
    result: Any


class Recorder:
    """Where the calls of a module note their operators.

    Attributes:
        visits: the operators that a module can stand for, in the order of calls.
        places: the places in the code that were reached.
        current: the name of the site that is carried out now; "" for none.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.places: set[str] = set()
        self.current = ""

    def run(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a function or method and note it."""
        self.places.add(place_of(name))
        self.current = name
        try:
            result = carry_out(function, args, kwargs)
        finally:
            self.current = ""
        row = operator_of(function)
        if row is not None and row.module:
            self.visits.append(Visit(name, row.word, row.operands(args, kwargs), result))
        return result


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
        self._owner, self._routes = owner, owner.torchq_routes
        self._path, self._place = path, place
        self._visits: dict[str, int] = {}

    def enter(self, site: str) -> Route:
        """Return the router of a function that is called at ``site``."""
        return Route(self._owner, f"{self._name(site)}.", f"{self._place}{site}.")

    def binary(self, site: str, name: str, first: Any, second: Any) -> Any:
        """Carry out ``operator.<name>(first, second)``, or call the child for it."""
        return self._run(site, getattr(operator, name), (first, second), {})

    def call(self, site: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carry out ``function(*args, **kwargs)``, or call the child for it."""
        return self._run(site, function, args, kwargs)

    def method(self, site: str, name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry out ``owner.<name>(*args, **kwargs)``, or call the child for it."""
        return self._run(site, name, (owner, *args), kwargs)

    def own(self, how: str) -> Any:
        """Return the children of the module without those that stand for operators."""
        hidden = self._routes.added(self._owner)
        hidden += [f"{slot}_quantizer" for slot in type(self._owner).slots()]
        children = self._owner.named_children()
        found = {name: child for name, child in children if name not in hidden}
        is_keyed = isinstance(self._owner, nn.ModuleDict)
        if how == "mapping" or (how == "iterated" and is_keyed):
            return found
        if how in ("items", "named_children"):
            return list(found.items())
        return list(found if how == "keys" else found.values())

    def _run(self, site: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
