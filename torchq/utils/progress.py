"""The one import of tqdm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm.auto import tqdm

__all__ = ["progress_bar", "progress_stages"]

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
    """Iterate over ``items`` behind a bar that shows the rate and the time left.

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
    yield from _bar(
        items, desc=description, total=total, unit=unit, disable=not enabled, delay=delay
    )


@contextmanager
def progress_stages(
    description: str, names: Sequence[str], *, enabled: bool = True, delay: float = 1.0
) -> Iterator[Callable[[], None]]:
    """Show a bar over the unlike stages of one call, each with its name.

    Args:
        description: in front of the bar.
        names: of the stages, in order; the first one begins with the block.
        enabled: with False there is no bar.
        delay: seconds after which the bar appears.

    Yields:
        A function that ends a stage and begins the next one.

    Example:
        >>> with progress_stages("export", ("trace", "write"), enabled=False) as next_stage:
        ...     next_stage()
    """
    options = {"unit": "stage", "disable": not enabled, "delay": delay, "mininterval": 0}
    with _bar(total=len(names), desc=f"{description}: {names[0]}", **options) as bar:
        waiting = iter(names[1:])

        def advance() -> None:
            name = next(waiting, None)
            if name is not None:
                bar.set_description_str(f"{description}: {name}", refresh=False)
            bar.update()

        yield advance


def _bar(items: Any = None, **options: Any) -> Any:
    """Return a bar that disappears when it is done, and that follows the width of its terminal."""
    return tqdm(items, leave=False, dynamic_ncols=True, **options)
