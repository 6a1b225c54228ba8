"""The one import of tqdm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm.auto import tqdm

__all__ = ["progress_bar"]

T = TypeVar("T")


def progress_bar(
    items: Iterable[T],
    *,
    description: str,
    total: int | None = None,
    enabled: bool = True,
    unit: str = "batch",
    delay: float = 0.0,
) -> Iterator[T]:
    """Iterate over ``items`` behind a bar that shows the rate.

    Args:
        items: anything iterable.
        description: in front of the bar.
        total: how many items there are; default ``len(items)`` where there is one.
        enabled: with False there is no bar.
        unit: of the rate, per second.
        delay: seconds after which the bar appears.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    yield from tqdm(
        items,
        desc=description,
        total=total,
        unit=unit,
        disable=not enabled,
        leave=False,
        dynamic_ncols=True,
        delay=delay,
    )
