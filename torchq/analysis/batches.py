"""Batches as the functions of this package take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torchq.utils import check_batches


@dataclass(frozen=True)
class Batches:
    """An iterable of batches, with the number that is going to be read.

    Attributes:
        source: what the user gave.
        total: the number of batches, or None where it is not known.
    """

    source: Iterable[Any]
    total: int | None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def checked_batches(where: str, batches: Any, num_batches: int | None = None) -> Batches:
    """Return ``batches`` with their number; ``where`` is the function that was called."""
    check_batches(where, batches, num_batches)
    length = len(batches) if isinstance(batches, Sized) else None
    known = [number for number in (length, num_batches) if number is not None]
    return Batches(batches, min(known) if length is not None else num_batches)
