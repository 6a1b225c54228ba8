"""A store of tensors that keeps what does not fit a limit of memory in files."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["TensorStore", "map_tensors"]


def map_tensors(
    value: Any,
    change: Callable[[Any], Any],
    leaves: tuple[type, ...] = (Tensor,),
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """Return ``value`` with each of its tensors replaced, in tuples, lists, mappings, dataclasses.

    Args:
        value: anything.
        change: from a leaf to what takes its place.
        leaves: the types to replace.
        other: from anything else to what takes its place; None keeps it.

    Example:
        >>> map_tensors((torch.ones(2), [3]), lambda t: t.sum().item())
        (2.0, [3])
    """

    def inside(item: Any) -> Any:
        return map_tensors(item, change, leaves, other)

    if isinstance(value, leaves):
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
    return value if other is None else other(value)


def _copied(value: Any) -> Any:
    """Return a copy of an object that a block may write to, such as a cache of keys and values."""
    if callable(value):  # a module, or a method of one
        return value
    return copy.deepcopy(value)


@dataclasses.dataclass(frozen=True)
class _OnDisk:
    """The place of a tensor that was written to a file."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def read(self) -> Tensor:
        loaded: Tensor = torch.load(self.path, map_location=self.device, weights_only=True)
        return loaded


@dataclasses.dataclass(frozen=True)
class _Blank:
    """What is left of a tensor whose values nobody needs."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def read(self) -> Tensor:
        value = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), value, dtype=self.dtype, device=self.device).expand(self.shape)


class TensorStore:
    """Values that hold tensors, by key; a context manager.

    The first ``limit`` bytes stay in memory, where they are. What comes above is written to files
    in a temporary folder, which is removed at the end.

    Args:
        limit: bytes.

    Example:
        >>> with TensorStore(limit=8) as store:
        ...     store.put("small", torch.ones(2))
        ...     store.put("large", {"x": torch.ones(1000)})
        ...     store.get("large")["x"].sum().item(), store.in_memory
        (1000.0, 8)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_memory = 0
        self._values: dict[Any, Any] = {}
        self._folder: Path | None = None
        self._files = 0

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._values.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def put(self, key: Any, value: Any) -> None:
        """Keep copies of the tensors of ``value`` under ``key``."""
        self.drop(key)
        self._values[key] = map_tensors(value, self._keep)

    def get(self, key: Any) -> Any:
        """Return a copy of the value under ``key``, which the caller may change."""
        return map_tensors(
            self._values[key],
            lambda kept: kept.clone() if isinstance(kept, Tensor) else kept.read(),
            (Tensor, _OnDisk, _Blank),
            _copied,
        )

    def blank(self, key: Any) -> None:
        """Forget the values of the tensors under ``key``, if it is there, but not their shapes.

        Then :meth:`get` returns NaN, without memory for each element.
        """
        if key in self._values:
            leaves = (Tensor, _OnDisk, _Blank)
            self._values[key] = map_tensors(self._values[key], self._blanked, leaves)

    def drop(self, key: Any) -> None:
        """Forget ``key``, if it is there."""
        if key in self._values:
            map_tensors(self._values.pop(key), self._forget, (Tensor, _OnDisk))

    def _blanked(self, kept: Tensor | _OnDisk | _Blank) -> _Blank:
        if isinstance(kept, _Blank):
            return kept
        self._forget(kept)
        return _Blank(kept.shape, kept.dtype, kept.device)

    def _forget(self, kept: Tensor | _OnDisk) -> None:
        if isinstance(kept, Tensor):
            self.in_memory -= kept.nbytes
        else:
            kept.path.unlink()

    def _keep(self, tensor: Tensor) -> Any:
        if self.in_memory + tensor.nbytes <= self.limit:
            self.in_memory += tensor.nbytes
            return tensor.detach().clone()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="torchq-"))
        self._files += 1
        path = self._folder / f"{self._files}.pt"
        torch.save(tensor.detach().contiguous().clone(), path)
        return _OnDisk(path, tensor.shape, tensor.dtype, tensor.device)
