"""Copies of a model to try changes on, and changes that are undone where they fail."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

__all__ = ["copy_module", "undone_on_error"]

M = TypeVar("M", bound=nn.Module)


def copy_module(module: M, *, sharing: Iterable[Any] = ()) -> M:
    """Return a deep copy of ``module`` that shares with it what Python cannot copy.

    Children, parameters, buffers and hooks are copied as :func:`copy.deepcopy` copies them. An
    object below an attribute that cannot be copied (a Python module, a lock, a tensor with a
    gradient history) is the same object in the copy.

    Args:
        module: left unchanged.
        sharing: further objects (modules, parameters) that the copy holds itself.

    Returns:
        The copy.

    Raises:
        Exception: what ``copy.deepcopy`` raises, where sharing attributes does not help.

    Example:
        >>> import math
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.library = math
        >>> copy_module(layer).library is math
        True
    """
    memo = {id(item): item for item in sharing}
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # an attribute may fail to copy in any way it likes
        return copy.deepcopy(module, {**_what_cannot_be_copied(module), **memo})


def _what_cannot_be_copied(module: nn.Module) -> dict[int, Any]:
    """Return the objects below attributes of ``module`` that ``copy.deepcopy`` refuses, by id."""
    tree = {id(part): part for part in module.modules()}
    shared: dict[int, Any] = {}
    for part in tree.values():
        for name, value in list(vars(part).items()):  # traced modules change while they are copied
            if name != "_modules":
                _collect(value, tree, shared, set())
    return shared


def _collect(value: Any, tree: dict[int, Any], shared: dict[int, Any], seen: set[int]) -> None:
    """Add to ``shared`` the smallest parts of ``value`` that cannot be copied."""
    if id(value) in tree or id(value) in seen:
        return
    seen.add(id(value))
    try:
        copy.deepcopy(value, {**tree, **shared})
    except Exception:  # see copy_module
        known = len(shared)
        for part in _parts(value):
            _collect(part, tree, shared, seen)
        if len(shared) == known:
            shared[id(value)] = value


def _parts(value: Any) -> Iterator[Any]:
    """Yield what ``value`` refers to, where ``copy.deepcopy`` would follow it."""
    if isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif not isinstance(value, types.ModuleType):
        yield from getattr(value, "__dict__", {}).values()


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Give ``model`` its modules, attributes and tensors back where the body raises.

    Every exception counts, also KeyboardInterrupt. Replaced and added tensors are undone;
    numbers that the body wrote into a tensor in place are not.

    Args:
        model: the body may replace its modules, parameters, buffers and attributes.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> try:
        ...     with undone_on_error(model):
        ...         model[0] = torch.nn.ReLU()
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt:
        ...     print(model[0])
        Linear(in_features=2, out_features=2, bias=True)
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    contents = [
        (value, value.copy())
        for _, values in attributes
        for value in values.values()
        if isinstance(value, dict)
    ]
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)
        for value, content in contents:
            value.clear()
            value.update(content)
        for parameter, tensor in data:
            parameter.data = tensor
        raise
