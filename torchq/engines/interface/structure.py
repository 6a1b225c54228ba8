"""The structure of a call's results without its tensors, of which a graph returns a flat list."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchq.errors import ExportError

__all__ = ["Structure", "flatten", "tensors_of"]

#: Values without tensors, which a graph cannot return: they are what they were for the example.
_CONSTANTS = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """The place of a tensor.

    Attributes:
        index: its number in the flat list. One tensor may have several places.
    """

    index: int

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        return tensors[self.index]

    def collect(self, value: Any, tensors: dict[int, Tensor]) -> None:
        tensors[self.index] = value


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A value without tensors."""

    value: Any

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        return self.value

    def collect(self, value: Any, tensors: dict[int, Tensor]) -> None:
        """Leave the value out, as it was none for the example: tracing makes tensors of sizes."""


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A tuple, a named tuple, or a list."""

    kind: type
    parts: tuple[Structure, ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        values = [part.rebuild(tensors) for part in self.parts]
        return self.kind(*values) if hasattr(self.kind, "_fields") else self.kind(values)

    def collect(self, value: Any, tensors: dict[int, Tensor]) -> None:
        for part, own in zip(self.parts, value, strict=True):
            part.collect(own, tensors)


@dataclasses.dataclass(frozen=True)
class _Mapping:
    """A dictionary, or a dataclass that is one too, as results of Hugging Face models are."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Structure, ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        values = (part.rebuild(tensors) for part in self.parts)
        items = dict(zip(self.keys, values, strict=True))
        return self.kind(**items) if dataclasses.is_dataclass(self.kind) else self.kind(items)

    def collect(self, value: Any, tensors: dict[int, Tensor]) -> None:
        for part, key in zip(self.parts, self.keys, strict=True):
            part.collect(value[key], tensors)


@dataclasses.dataclass(frozen=True)
class _Dataclass:
    """An object of a dataclass; its own ``__init__`` does not run again."""

    kind: type
    names: tuple[str, ...]
    parts: tuple[Structure, ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        result: Any = object.__new__(self.kind)
        for name, part in zip(self.names, self.parts, strict=True):
            object.__setattr__(result, name, part.rebuild(tensors))  # it may be frozen
        return result

    def collect(self, value: Any, tensors: dict[int, Tensor]) -> None:
        for part, name in zip(self.parts, self.names, strict=True):
            part.collect(getattr(value, name), tensors)


Structure: TypeAlias = _Leaf | _Constant | _Sequence | _Mapping | _Dataclass


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Return the tensors in the results of a model, each once, and their structure.

    Args:
        value: tensors in tuples, lists, mappings and dataclasses, with numbers and text beside
            them.

    Returns:
        The tensors, and a structure whose ``rebuild(tensors)`` puts others in their places.

    Raises:
        ExportError: an object of another class, which could hold tensors too.

    Example:
        >>> tensors, structure = flatten({"a": (torch.zeros(1), torch.ones(1)), "b": None})
        >>> structure.rebuild([1, 2])
        {'a': (1, 2), 'b': None}
    """
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def place_of(tensor: Tensor) -> _Leaf:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return _Leaf(places[id(tensor)])

    structure = _structure_of(value, place_of)
    return tensors, structure


def tensors_of(structure: Structure, value: Any) -> list[Tensor]:
    """Return the tensors of a value of the same structure, in the order of :func:`flatten`."""
    tensors: dict[int, Tensor] = {}
    structure.collect(value, tensors)
    return [tensors[index] for index in sorted(tensors)]


def _structure_of(value: Any, place_of: Callable[[Tensor], _Leaf]) -> Structure:
    if isinstance(value, Tensor):
        return place_of(value)
    if isinstance(value, (tuple, list)):
        kind = list if isinstance(value, list) else type(value)
        named = hasattr(kind, "_fields")
        return _Sequence(
            kind if named or kind is list else tuple,
            tuple(_structure_of(part, place_of) for part in value),
        )
    if isinstance(value, Mapping):
        parts = tuple(_structure_of(part, place_of) for part in value.values())
        return _Mapping(type(value), tuple(value), parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        parts = tuple(_structure_of(getattr(value, name), place_of) for name in names)
        return _Dataclass(type(value), names, parts)
    if isinstance(value, _CONSTANTS):
        return _Constant(value)
    raise ExportError(
        f"deploy: the model returns a {type(value).__name__}; expected tensors in tuples, lists, "
        "mappings and dataclasses, which a graph can return. Use engine='torch'"
    )
