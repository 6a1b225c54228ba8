"""What the reports of the algorithms have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchq.utils import table

__all__ = ["report_text"]


def report_text(
    header: Sequence[str], rows: Iterable[Sequence[str]], skipped: Mapping[str, str], last: str
) -> str:
    """Return a table of what was treated and of what was left alone, and a last line.

    The reason for each layer in ``skipped`` stands in the last column.
    """
    empty = [""] * (len(header) - 2)
    left = [(name, *empty, f"SKIPPED: {reason}") for name, reason in skipped.items()]
    return f"{table([tuple(header), *map(tuple, rows), *left])}\n{last}"
