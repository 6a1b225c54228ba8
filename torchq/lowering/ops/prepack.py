"""Weights in the layout that a kernel wants, made at the first call and kept as long as the plain weight lives.

Packed tensors are opaque: they can be neither copied nor saved. So modules hold plain int8 weights, and what is derived from them
lives here, under a weak reference to the plain tensor. Copies, files and exported programs then need no special case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["PackCache"]


class PackCache:
    """Derived data by (weight, key). Safe to use from several threads; only building takes the lock.

    Weights must not be changed in place afterwards, unless :meth:`forget` is called.

    Args:
        most: how many keys one weight may have; the oldest goes.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._entries = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def get(
        self,
        weight: Tensor,
        key: Hashable,
        companions: Sequence[Tensor | None],
        build: Callable[[], Any],
    ) -> Any:
        """What ``build`` returned for this weight, key and ``companions`` (scales and bias: they enter what is built).

        It must not hold ``weight`` or a view of it, which would then live forever.
        """
        found = self._entries.get(weight)
        entry = found.get(key) if found is not None else None
        if entry is not None and _same(entry[0], companions):
            return entry[1]
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return build()  # only a replay of the graph computes it
        with self._lock:
            if weight not in self._entries:
                self._entries[weight] = {}
            entries = self._entries[weight]
            if key not in entries or not _same(entries[key][0], companions):
                if len(entries) >= self._most:
                    # A new dictionary: another thread may be reading the old one.
                    entries = self._entries[weight] = dict(list(entries.items())[1 - self._most :])
                built = build()
                if weight.is_cuda:  # another thread may use it on another stream
                    torch.cuda.current_stream(weight.device).synchronize()
                entries[key] = (companions, built)
            return entries[key][1]

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self, weight: Tensor) -> None:
        """Drop what was built for ``weight``: its values have changed."""
        with self._lock:
            self._entries.pop(weight, None)


def _same(before: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> bool:
    return all(a is b for a, b in zip(before, now, strict=True))
