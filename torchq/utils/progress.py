"""Progress bars: the one import of tqdm.

Every function that may take longer than a second has an argument ``progress=True``. Its bar shows
the time left, on a terminal or in a notebook alone; it appears after a second and disappears at the
end. The names of stages appear at once, as one stage alone may take a minute.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

#: Seconds after which a bar appears.
_DELAY = 1.0


def progress_bar(
    items: Iterable[T],
    *,
    description: str,
    most: int | None = None,
    total: int | None = None,
    enabled: bool = True,
    unit: str = "batch",
) -> Iterator[T]:
    """Iterate over ``items``, ``most`` of them, behind a bar with the rate and the time left."""
    total = item_count(items, most) if total is None else total
    yield from _bar(
        enabled, islice(items, most), desc=description, total=total, unit=unit
    )


def item_count(items: Iterable[object], most: int | None = None) -> int | None:
    """Return how many of the items are read, ``most`` of them; None where that is not known."""
    length = len(items) if isinstance(items, Sized) else None
    return min((n for n in (length, most) if n is not None), default=None)


@contextmanager
def progress_stages(
    description: str, names: Sequence[str], *, enabled: bool = True
) -> Iterator[Callable[[], None]]:
    """Show a bar over the unlike stages of one call; yield a function that begins the next one."""
    options = {"unit": "stage", "mininterval": 0, "delay": 0}
    with _bar(
        enabled, total=len(names), desc=f"{description}: {names[0]}", **options
    ) as bar:
        waiting = iter(names[1:])

        def advance() -> None:
            name = next(waiting, None)
            if name is not None:
                bar.set_description_str(f"{description}: {name}", refresh=False)
            bar.update()

        yield advance


def _bar(enabled: bool, items: Any = None, **options: Any) -> Any:
    """Return a bar that disappears when it is done, also in notebooks, as wide as its terminal."""
    hidden = None if enabled else True
    options = {"delay": _DELAY, **options}
    return tqdm(items, disable=hidden, leave=False, dynamic_ncols=True, **options)
