"""The result: a config, with the choice for each layer and the front of alternatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchq.analysis.plotting import axes_or_new
from torchq.analysis.tables import html_table, plain_number
from torchq.config import QuantConfig
from torchq.utils import table

__all__ = ["FrontPoint", "LayerChoice", "MixedPrecision"]


@dataclass(frozen=True)
class LayerChoice:
    """The format of one layer.

    Attributes:
        name: its dotted path.
        format: the name of the format, ``"float"`` among them.
        damage: what this format costs at the output, by the metric.
        weights: elements of its weights.
        weight_bits: their width.
        input_bits: the width of its input.
        group: number of the group of layers that have one format together.
    """

    name: str
    format: str
    damage: float
    weights: int
    weight_bits: int
    input_bits: int
    group: int


@dataclass(frozen=True)
class FrontPoint:
    """One choice of formats that no other one beats in both cost and damage.

    Attributes:
        costs: by kind of budget.
        damage: the predicted damage of all layers together.
        formats: path of each layer -> the name of its format.
    """

    costs: Mapping[str, float]
    damage: float
    formats: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(QuantConfig):
    """A config with a format for each layer, to be given to :func:`torchq.quantize_`.

    Attributes:
        choices: the format of each layer.
        front: alternatives, the cheapest first.
        budget: what was asked for.
        costs: what the config costs, by kind of budget.
        damage: its predicted damage.
        metric: what damage is measured by.
    """

    choices: tuple[LayerChoice, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    budget: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    damage: float = math.nan
    metric: str = ""

    def summary(self) -> dict[str, Any]:
        """Return choices and front as JSON data; :meth:`to_dict` returns the config."""
        return {
            "metric": self.metric,
            "budget": dict(self.budget),
            "costs": dict(self.costs),
            "damage": plain_number(self.damage),
            "choices": [vars(choice) for choice in self.choices],
            "front": [
                {"costs": dict(p.costs), "damage": p.damage, "formats": dict(p.formats)}
                for p in self.front
            ],
        }

    def _cells(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layer", "format", "weights", f"damage ({self.metric})")]
        for choice in self.choices:
            figures = (f"{choice.weights:,}", f"{choice.damage:.2e}")
            rows.append((choice.name or "(root)", choice.format, *figures))
        return rows

    def _ending(self) -> str:
        costs = ", ".join(f"{kind} {value:.4g}" for kind, value in self.costs.items())
        asked = ", ".join(f"{kind} {value:.4g}" for kind, value in self.budget.items())
        return f"budget {asked}; costs {costs}; predicted damage {self.damage:.2e}"

    def __str__(self) -> str:
        return f"{table(self._cells())}\n{self._ending()}"

    def _repr_html_(self) -> str:
        return html_table(self._cells(), self._ending())

    def plot(self, ax: Any = None) -> Any:
        """Draw the front with matplotlib, and the chosen point.

        Args:
            ax: axes to draw on; default new ones.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        ax = axes_or_new(ax)
        kind = next(iter(self.budget))
        points = [(p.costs[kind], p.damage) for p in self.front]
        ax.plot(*zip(*points, strict=True), marker="o")
        ax.plot([self.costs[kind]], [self.damage], marker="*", markersize=14)
        ax.set_xlabel(kind)
        ax.set_ylabel(f"predicted damage ({self.metric})")
        return ax
