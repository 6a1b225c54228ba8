"""Containers with operators of their own: their items are the children that their author gave them.

A parent counts, indexes and iterates over such a module as before.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def _children(container: Any) -> dict[str, nn.Module]:
    children: dict[str, nn.Module] = container.torchq_routes.children(container)
    return children


def _length(self: Any) -> int:
    return len(_children(self))


def _has_key(self: Any, key: str) -> bool:
    return key in _children(self)


def _keys(self: Any) -> object:
    return _children(self).keys()


def _values(self: Any) -> object:
    return _children(self).values()


def _pairs(self: Any) -> object:
    return _children(self).items()


def _iterated_keys(self: Any) -> Iterator[str]:
    return iter(_children(self))


def _iterated(self: Any) -> Iterator[nn.Module]:
    return iter(_children(self).values())


def _of_key(self: Any, key: str) -> nn.Module:
    return _children(self)[key]


def _of_list(self: Any, index: object) -> object:
    members = list(_children(self).values())
    return (
        self.float_class(members[index])
        if isinstance(index, slice)
        else members[_whole(index)]
    )


def _of_sequence(self: Any, index: object) -> object:
    if isinstance(index, slice):
        return self.float_class(OrderedDict(list(_children(self).items())[index]))
    return list(_children(self).values())[_whole(index)]


def _whole(index: Any) -> int:
    return operator.index(index)


_LISTS: dict[str, Callable[..., object]] = {"__len__": _length, "__iter__": _iterated}
#: The methods of each container of torch that show its items.
_METHODS: dict[type[nn.Module], dict[str, Callable[..., object]]] = {
    nn.Sequential: {**_LISTS, "__getitem__": _of_sequence},
    nn.ModuleList: {**_LISTS, "__getitem__": _of_list},
    nn.ModuleDict: {
        "__len__": _length,
        "__iter__": _iterated_keys,
        "__getitem__": _of_key,
        "__contains__": _has_key,
        "keys": _keys,
        "values": _values,
        "items": _pairs,
    },
}


def items_of_authors(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the methods that a routed class below ``cls`` needs; those of the user's own stay."""
    base = next(
        (container for container in _METHODS if issubclass(cls, container)), None
    )
    methods = {} if base is None else _METHODS[base]
    return {
        name: m
        for name, m in methods.items()
        if getattr(cls, name) is getattr(base, name)
    }
