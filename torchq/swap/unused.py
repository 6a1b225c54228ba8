"""Layers that nothing calls, as far as the code of a model or a run on an example shows."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from torch import nn

from torchq.swap.decision import Decision

__all__ = ["NOT_CALLED", "with_unread_noted"]

#: The note about a layer that a run on the example did not call.
NOT_CALLED = "not called in the run on the example"
_UNREAD = "no code of the model reads it, so it may never be called"
#: Names in code that may reach any child.
_DYNAMIC = frozenset({"children", "named_children", "modules", "named_modules", "_modules"})
_DYNAMIC |= {"getattr", "get_submodule", "attrgetter", "eval", "exec"}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def with_unread_noted(model: nn.Module, decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions with a note at each layer whose name no code of the model reads.

    Such a layer gets no range from calibration. The code is that of the classes of the model's
    modules, and the functions of the files they stand in. Where a class may reach its children by
    computed names, nothing is said about them.

    Args:
        model: A model.
        decisions: The decisions about its modules.
    """
    parents: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            parents.setdefault(id(child), []).append((parent, name))
    classes = {type(module) for module in model.modules() if not _is_torch(type(module))}
    bases = {base for cls in classes for base in cls.__mro__ if not _is_torch(base)}
    read = frozenset[str]().union(
        *(_names_in_class(cls) for cls in classes),  # type: ignore[arg-type]
        *(_names_in_file(base.__module__) for base in bases),
    )

    def is_unread(module: nn.Module) -> bool:
        places = parents.get(id(module), [])
        return bool(places) and all(
            not isinstance(parent, _CONTAINERS)
            and not _is_torch(type(parent))
            and name not in read
            and not _DYNAMIC & _names_in_class(type(parent))  # type: ignore[arg-type]
            for parent, name in places
        )

    return [
        replace(d, note=_UNREAD) if _is_layer(d) and not d.note and is_unread(d.module) else d
        for d in decisions
    ]


def _is_layer(decision: Decision) -> bool:
    return not decision.reason and not decision.calls and decision.rule is not None


def _is_torch(cls: type) -> bool:
    return cls.__module__.startswith(("torch.", "torchq."))


@cache
def _names_in_class(cls: type) -> frozenset[str]:
    """Return the names that the methods of a class and its bases read."""
    bases = (base for base in cls.__mro__ if base is not object and not _is_torch(base))
    return frozenset(name for base in bases for name in _names_in(tuple(vars(base).values())))


@cache
def _names_in_file(module: str) -> frozenset[str]:
    """Return the names that the functions of a Python module read, without its classes."""
    return frozenset(_names_in(tuple(vars(sys.modules.get(module, object)).values())))


def _names_in(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType):
            yield from _loads(function.__code__)


def _loads(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code loads, and its texts, which may be names for ``getattr``."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD") and isinstance(instruction.argval, str):
            yield instruction.argval
        elif isinstance(instruction.argval, types.CodeType):
            yield from _loads(instruction.argval)
