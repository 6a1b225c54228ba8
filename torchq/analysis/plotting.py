"""Axes of matplotlib, which ``plot`` of every report draws on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchq.utils.optional import import_optional

__all__ = ["axes_or_new", "draw_errors"]


def axes_or_new(ax: Any, width: float = 7.0, height: float = 3.5) -> Any:
    """Return ``ax``, or new axes.

    Args:
        ax: axes of matplotlib, or None.
        width: of new axes, in inches.
        height: of new axes, in inches.

    Raises:
        MissingExtraError: New axes are needed, and matplotlib is not installed.
    """
    if ax is not None:
        return ax
    pyplot = import_optional("matplotlib.pyplot", "plot", "report")
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def draw_errors(ax: Any, names: Sequence[str], errors: Mapping[str, Sequence[float]]) -> Any:
    """Draw errors along a network as groups of bars, and return the axes.

    Args:
        ax: axes, or None for new ones.
        names: of the layers, in the order of the network.
        errors: label -> one error for each layer, relative to the signal.
    """
    ax = axes_or_new(ax, max(6.0, 1.5 + 0.22 * len(names)))
    width = 0.8 / max(1, len(errors))
    for number, (label, values) in enumerate(errors.items()):
        places = [i + number * width - 0.4 + width / 2 for i in range(len(names))]
        ax.bar(places, values, width, label=label)
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize="small")
    ax.set_ylabel("error / signal")
    ax.legend()
    return ax
