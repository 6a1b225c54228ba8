"""Batches as the functions of this package take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchq.errors import ConfigError

__all__ = ["Batches", "checked_batches"]


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
    """Return ``batches`` with their number.

    Args:
        where: the function that was called, for error texts.
        batches: an iterable of batches.
        num_batches: the number of batches to stop after.

    Raises:
        ConfigError: One batch was given in the place of an iterable of them, or something else.
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise ConfigError(
            f"{where}: got a {kind} as batches; expected an iterable of batches. "
            "Pass [batch] for one batch"
        )
    length = len(batches) if isinstance(batches, Sized) else None
    known = [number for number in (length, num_batches) if number is not None]
    return Batches(batches, min(known) if length is not None else num_batches)
