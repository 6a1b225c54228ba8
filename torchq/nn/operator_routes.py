"""Routers: they redirect the operators of a rewritten forward to child modules, or note them.

See :mod:`torchq.graph.source` for how a forward is rewritten. The name of an operator starts with
``@`` and tells where in the code it is: ``@3`` is the fourth site of the forward, ``@3#1`` its
second visit in one call (a loop), ``@5.2`` the third site of a function called at the sixth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from torchq.graph import operator_of
from torchq.nn.modules.operators import Tap

#: The first character of the names of sites; those of nodes of a trace do not have it.
MARK = "@"


@dataclass(frozen=True)
class Visit:
    """One operator that a forward carried out.

    Attributes:
        name: where it is in the code.
        kind: see :func:`torchq.graph.operator_kind`.
        operands: see :attr:`torchq.graph.Operator.operands`.
        result: what it returned.
    """

    name: str
    kind: str
    operands: tuple[Any, ...] | None
    result: Any


class Recorder:
    """Where the calls of a module note their operators.

    Attributes:
        visits: the operators, in the order of calls.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []


def base_name(name: str) -> str:
    """Return the name of a site without the number of the visit."""
    head, _, last = name.rpartition(".")
    site = last.partition("#")[0]
    return f"{head}.{site}" if head else site


class Route:
    """The router of one call of a module's forward, or of a function in it."""

    __slots__ = ("_owner", "_path", "_visits")

    def __init__(self, owner: Any, path: str = MARK) -> None:
        self._owner = owner
        self._path = path
        self._visits: dict[str, int] = {}

    def enter(self, site: str) -> Route:
        """Return the router of a function that is called at ``site``."""
        return Route(self._owner, f"{self._name(site)}.")

    def binary(self, site: str, name: str, first: Any, second: Any) -> Any:
        """Carry out ``operator.<name>(first, second)``, or call the child for it."""
        return self.call(site, getattr(operator, name), first, second)

    def call(self, site: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carry out ``function(*args, **kwargs)``, or call the child for it."""
        child = self._child(site)
        if child is not None and _are_tensors(function, args, kwargs):
            if isinstance(child, Tap):
                return function(child(args[0]), *args[1:], **kwargs)
            return child(*args, **kwargs)
        result = function(*args, **kwargs)
        if self._owner.recorder is not None:
            self._note(site, function, args, kwargs, result)
        return result

    def method(self, site: str, name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry out ``owner.<name>(*args, **kwargs)``, or call the child for it."""
        child = self._child(site)
        if child is not None and _are_tensors(name, (owner, *args), kwargs):
            if isinstance(child, Tap):
                return getattr(child(owner), name)(*args, **kwargs)
            return child(owner, *args, **kwargs)
        result = getattr(owner, name)(*args, **kwargs)
        if self._owner.recorder is not None:
            self._note(site, name, (owner, *args), kwargs, result)
        return result

    def _name(self, site: str) -> str:
        place = self._path + site
        if site.endswith("f"):  # a nested function, which checkpointing may run again
            return place
        number = self._visits.get(site, 0)
        self._visits[site] = number + 1
        return f"{place}#{number}" if number else place

    def _child(self, site: str) -> nn.Module | None:
        owner = self._owner
        if owner.recorder is not None or self._path + site not in owner.replaced_sites:
            return None
        name = owner.replacements.get(self._name(site))
        return None if name is None else getattr(owner, name)

    def _note(
        self, site: str, function: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        row = operator_of(function)
        if row is None or not row.module:
            return
        operands = row.operands(args, kwargs)
        self._owner.recorder.visits.append(Visit(self._name(site), row.word, operands, result))


def _are_tensors(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return False where a call has a number in the place of a tensor, or another form."""
    row = operator_of(function)
    operands = None if row is None else row.operands(args, kwargs)
    return operands is not None and all(isinstance(o, (Tensor, fx.Proxy)) for o in operands)
