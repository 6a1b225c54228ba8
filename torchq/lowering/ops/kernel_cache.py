"""Kernels made from a weight: packed copies of it, and functions with such a copy bound.

Packed tensors are opaque: they can be neither copied nor saved. Modules therefore hold plain int8
weights, and what is derived from these is kept here, under a weak reference to the plain tensor.
Copies, files and exported programs then need no special case.

One rule says how long an entry holds: as long as everything that it was made from. The weight and
its companions (scales, bias) are compared by identity, numbers are part of the key, and who changes
the values of a weight in place calls :meth:`KernelCache.forget`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["KERNELS", "MOST_SHAPES", "KernelCache", "drop_oldest"]

#: How many input shapes kernels are kept for. oneDNN itself keeps a thousand compiled kernels: as
#: many as a network of 30 layers needs for this number of shapes.
MOST_SHAPES = 32

#: A kind of kernel, and the numbers that it was made from.
Key = tuple[str, Hashable]


class KernelCache:
    """Kernels by weight and key. Several threads may use it; only building takes the lock.

    Args:
        most: how many kernels of one kind a weight may have; the oldest goes.
    """

    def __init__(self, most: int = MOST_SHAPES) -> None:
        self._most = most
        self._entries = WeakTensorKeyDictionary()
        self._lock = threading.RLock()  # building a bound kernel asks for a packed weight

    def get(
        self,
        weight: Tensor,
        key: Key,
        companions: Sequence[Tensor | None],
        build: Callable[[], Any],
    ) -> Any:
        """Return what ``build`` returned for this weight, key and companions.

        Args:
            weight: what the kernel is made from.
            key: the kind of kernel, and the numbers that enter it.
            companions: further tensors that enter it: scales, bias.
            build: makes the kernel. It must not hold ``weight`` or a view of it, which would
                then live forever.
        """
        found = self._entries.get(weight)
        entry = found.get(key) if found is not None else None
        if entry is not None and _same(entry[0], companions):
            return entry[1]
        with self._lock:
            entry = self._entries.get(weight, {}).get(key)
            if entry is None or not _same(entry[0], companions):
                entry = (companions, build())
                # A new dictionary: another thread may be reading the old one.
                kept = self._without_oldest(self._entries.get(weight, {}), key)
                self._entries[weight] = {**kept, key: entry}
            return entry[1]

    def _without_oldest(self, entries: dict[Key, Any], key: Key) -> dict[Key, Any]:
        alike = [other for other in entries if other[0] == key[0] and other != key]
        dropped = set(alike[: max(0, len(alike) + 1 - self._most)])
        return {other: entry for other, entry in entries.items() if other not in dropped}

    def kept(self, weight: Tensor, kind: str) -> list[Any]:
        """Return the kernels of one kind that are kept for ``weight``."""
        entries = self._entries.get(weight, {})
        return [kernel for key, (_, kernel) in entries.items() if key[0] == kind]

    def __len__(self) -> int:
        """Return the number of weights that have kernels."""
        return len(self._entries)

    def forget(self, weight: Tensor) -> None:
        """Drop the kernels of ``weight``, because its values have changed in place."""
        with self._lock:
            self._entries.pop(weight, None)


def drop_oldest(entries: dict[Any, Any], most: int) -> None:
    """Make room for one more entry in a dictionary, by dropping its oldest ones in place.

    Args:
        entries: the dictionary, in order of age. Several threads may read it.
        most: how many entries there may be in all.
    """
    for key in list(entries)[: max(0, len(entries) + 1 - most)]:
        entries.pop(key, None)


def _same(before: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> bool:
    return all(a is b for a, b in zip(before, now, strict=True))


#: The kernels of this process, of all operators.
KERNELS = KernelCache()
