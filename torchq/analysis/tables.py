"""Rows of reports as HTML for notebooks, and numbers as text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

__all__ = ["bar", "decibel_text", "html_table", "percent_text", "plain_number"]

_STYLE = "text-align:right;font-variant-numeric:tabular-nums;padding:2px 10px"
_LEFT = "text-align:left;padding:2px 10px"


def html_table(rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return ``rows`` as an HTML table for ``_repr_html_``; the first one holds the headings.

    Args:
        rows: text; the first column is a name, the others are figures.
        caption: a sentence above the table.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        styles = [_LEFT, *[_STYLE] * (len(row) - 1)]
        return "".join(
            f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
            for cell, style in zip(row, styles, strict=True)
        )

    head, *body = rows
    lines = [f"<tr>{cells(head, 'th')}</tr>", *(f"<tr>{cells(row, 'td')}</tr>" for row in body)]
    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>'
    return f"<table>{title}{''.join(lines)}</table>"


def bar(share: float, width: int = 20) -> str:
    """Return a bar of at most ``width`` characters for a share between 0 and 1.

    Example:
        >>> bar(0.25, width=8)
        '##'
    """
    if not math.isfinite(share):
        return "?"
    return "#" * round(min(max(share, 0.0), 1.0) * width)


def decibel_text(value: float) -> str:
    """Return a ratio in dB for a reader: ``exact`` without noise, ``not finite`` for NaN."""
    if math.isnan(value):
        return "not finite"
    return "exact" if value == math.inf else f"{value:.1f} dB"


def percent_text(share: float) -> str:
    """Return a share between 0 and 1 in percent; tiny ones are not rounded to 0."""
    if share == 0:
        return "0"
    return f"{share:.2%}" if share >= 0.0001 else f"{share:.1e}"


def plain_number(value: float) -> float | None:
    """Return ``value`` for JSON, which knows neither infinity nor NaN: None stands for them."""
    return value if math.isfinite(value) else None
