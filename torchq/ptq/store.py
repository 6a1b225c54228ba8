"""Values that hold tensors, by key: the inputs and outputs of blocks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(
    value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda item: item
) -> Any:
    """Return ``value`` with each of its tensors replaced, in tuples, lists, mappings, dataclasses.

    ``other`` replaces what holds no tensors.

    >>> map_tensors((torch.ones(2), [3]), lambda t: t.sum().item())
    (2.0, [3])
    """

    def inside(item: Any) -> Any:
        return map_tensors(item, change, other)

    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inside, value))
    if type(value) in (tuple, list):
        return type(value)(map(inside, value))
    if isinstance(value, Mapping):
        changed = {key: inside(item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value)(**{name: inside(getattr(value, name)) for name in names})
    return other(value)


def _copied(value: Any) -> Any:
    """Return a copy of an object that a block may write to, such as a cache of keys and values."""
    return value if callable(value) else copy.deepcopy(value)  # callable: a module or its method


def _copied_tensor(tensor: Tensor) -> Tensor:
    is_blank = tensor.dim() > 0 and not any(tensor.stride())
    return tensor if is_blank else tensor.clone()


def _blank(tensor: Tensor) -> Tensor:
    """Return a tensor of NaN, or of 0 for integers, that has memory for one element."""
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.new_full((), value).expand(tensor.shape)


class TensorStore:
    """Copies of values, by key; what is read is a copy too, which the reader may change."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def put(self, key: Any, value: Any) -> None:
        """Keep copies of the tensors of ``value`` under ``key``."""
        self._values[key] = map_tensors(value, lambda tensor: tensor.detach().clone())

    def get(self, key: Any) -> Any:
        """Return a copy of the value under ``key``."""
        return map_tensors(self._values[key], _copied_tensor, _copied)

    def blank(self, key: Any) -> None:
        """Forget the values of the tensors under ``key``, if it is there, but not their shapes."""
        if key in self._values:
            self._values[key] = map_tensors(self._values[key], _blank)

    def drop(self, key: Any) -> None:
        """Forget ``key``, if it is there."""
        self._values.pop(key, None)
