"""Batches as the functions of this package take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchq.utils import check_batches

__all__ = ["Batches", "checked_batches", "gathered", "place_in_group"]


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
        ConfigError: One batch was given in the place of an iterable of them, or something else; or
            ``num_batches`` is no integer of at least 1.
    """
    check_batches(where, batches, num_batches)
    length = len(batches) if isinstance(batches, Sized) else None
    known = [number for number in (length, num_batches) if number is not None]
    return Batches(batches, min(known) if length is not None else num_batches)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all processes of a group in the order of their ranks.

    Args:
        value: of this process; it can be pickled.
        group: None is this process alone.
    """
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def place_in_group(count: int | None, group: dist.ProcessGroup | None) -> int:
    """Return the number of batches that the processes of lower rank have.

    So a batch has the same number as in one process that runs all of them, rank after rank.

    Args:
        count: batches of this process; None where it is not known.
        group: None is this process alone.
    """
    if group is None:
        return 0
    rank = dist.get_rank(group)
    before = gathered(count, group)[:rank]
    unknown = 1 << 20
    return sum(unknown if number is None else number for number in before)
