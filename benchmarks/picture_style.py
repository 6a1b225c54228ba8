"""Colours and helpers that the pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

__all__ = ["THEMES", "Theme", "bars", "figure", "save"]


@dataclass(frozen=True)
class Theme:
    """The colours of one background. The background itself stays transparent."""

    name: str
    ink: str
    quiet: str
    accent: str
    second: str


THEMES = (
    Theme("light", ink="#1f2328", quiet="#8c959f", accent="#0969da", second="#bf5b04"),
    Theme("dark", ink="#e6edf3", quiet="#7d8590", accent="#58a6ff", second="#f0883e"),
)


def figure(
    theme: Theme, columns: int, size: tuple[float, float], rows: int = 1
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row, in the colours of ``theme``."""
    settings = {
        "svg.fonttype": "none",  # text stays text, so that it can be read and found
        "svg.hashsalt": "torchq",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.titlecolor": theme.ink,
        "axes.edgecolor": theme.quiet,
        "axes.labelcolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
    }
    pyplot.rcParams.update(settings)
    fig, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return fig, list(axes.flat)


def bars(
    place: Any,
    names: Sequence[str],
    values: Sequence[float],
    theme: Theme,
    text: str,
    labels: bool = True,
) -> None:
    """Draw horizontal bars, the first at the top, with their values; torchq's stand out."""
    ours = [name.startswith(("torchq", "INT8", "W4A4", "W2A4")) for name in names]
    colours = [theme.accent if own else theme.quiet for own in ours]
    rows = range(len(names), 0, -1)
    place.barh(list(rows), values, color=colours, height=0.62)
    for row, value in zip(rows, values, strict=True):
        place.annotate(
            text.format(value), (value, row), xytext=(4, 0), textcoords="offset points", va="center"
        )
    place.set_yticks(list(rows), names if labels else [""] * len(names))
    place.set_xticks([])
    place.set_xlim(0, 1.22 * max(values))
    place.tick_params(length=0)
    place.spines["bottom"].set_visible(False)


def save(fig: Any, path: Path) -> None:
    """Write ``fig`` as an SVG file without a date, so that equal pictures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(fig)
