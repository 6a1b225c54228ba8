"""The ranking: rows, their text, and their pictures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from torchq.analysis.plotting import axes_or_new
from torchq.analysis.tables import bar, decibel_text, html_table, plain_number
from torchq.utils import table, wrap

__all__ = ["SensitivityReport", "SensitivityRow"]


@dataclass(frozen=True)
class SensitivityRow:
    """The effect of one layer or group.

    Attributes:
        name: the path of the layer, or the name of the group.
        value: of the metric, with this group alone switched.
        layers: paths of the layers of the group.
        quantizers: paths of the quantizers that were switched.
    """

    name: str
    value: float
    layers: tuple[str, ...]
    quantizers: tuple[str, ...]


@dataclass(frozen=True)
class SensitivityReport:
    """The layers in the order in which they should be excluded; ``print`` it.

    Attributes:
        rows: with ``mode="only"`` the one that hurts most comes first; with ``mode="all_but"`` the
            one whose absence helps most.
        metric: its name.
        unit: of the values.
        rising: True where a larger value is better.
        mode: ``"only"`` or ``"all_but"``.
        scope: ``"layer"``, ``"input"``, ``"weight"`` or ``"groups"``.
        baseline: the value with everything quantized.
        reference: the value of the float model, where the metric has one.
        unseen: groups that no batch reached.
        note: what could not be done as fast as usual, and why.
    """

    rows: tuple[SensitivityRow, ...]
    metric: str
    unit: str
    rising: bool
    mode: str
    scope: str
    baseline: float
    reference: float | None = None
    unseen: tuple[str, ...] = ()
    note: str = ""

    def worst(self, count: int = 1) -> list[str]:
        """Return the paths of the layers of the first ``count`` rows, for ``exclude=``.

        Args:
            count: rows, at least 0.
        """
        found = [layer for row in self.rows[:count] for layer in row.layers]
        return list(dict.fromkeys(found))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; None stands for what is infinite or not a number."""
        data = asdict(self)
        data["baseline"] = plain_number(self.baseline)
        data["reference"] = None if self.reference is None else plain_number(self.reference)
        for row in data["rows"]:
            row["value"] = plain_number(row["value"])
        return data

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def value_text(self, value: float) -> str:
        """Return a value of the metric for a reader."""
        if self.unit == "dB":
            return decibel_text(value)
        return f"{value:.4g} {self.unit}".rstrip()

    @property
    def shares(self) -> list[float]:
        """The length of each row's bar, 0 to 1: its harm, or its help with ``"all_but"``."""
        values = [row.value for row in self.rows]
        finite = [v for v in values if math.isfinite(v)]
        if not finite:
            return [0.0] * len(values)
        low, high = min(finite), max(finite)
        larger_counts = self.rising == (self.mode == "all_but")
        start, end = (low, high) if larger_counts else (high, low)
        if self.unit == "nat":
            start = 0.0
        width = end - start
        return [(v - start) / width if width and math.isfinite(v) else 0.0 for v in values]

    def _cells(self) -> list[tuple[str, ...]]:
        what = "only this quantized" if self.mode == "only" else "all but this quantized"
        rows: list[tuple[str, ...]] = [("rank", "layer", f"{self.metric}, {what}", "")]
        for number, (row, share) in enumerate(zip(self.rows, self.shares, strict=True), 1):
            name = row.name or "(root)"
            rows.append((str(number), name, self.value_text(row.value), bar(share)))
        return rows

    def _ending(self) -> str:
        parts = [f"everything quantized: {self.value_text(self.baseline)}"]
        if self.reference is not None:
            parts.append(f"nothing quantized: {self.value_text(self.reference)}")
        if self.unseen:
            parts.append(f"not reached: {', '.join(self.unseen)}")
        if self.note:
            parts.append(self.note)
        if math.isnan(self.baseline):
            parts.append("torchq.layer_errors names the layer that NaN or infinity comes from")
        elif self.rows:
            parts.append(f"try exclude={self.worst(2)!r}")
        return "; ".join(parts)

    def __str__(self) -> str:
        return f"{table(self._cells())}\n{wrap(self._ending())}"

    def _repr_html_(self) -> str:
        return html_table([row[1:] for row in self._cells()], self._ending())

    def plot(self, ax: Any = None, *, most: int = 30) -> Any:
        """Draw the first rows as bars with matplotlib.

        Args:
            ax: axes to draw on; default new ones.
            most: rows to draw.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        rows = self.rows[:most]
        ax = axes_or_new(ax, height=0.8 + 0.24 * len(rows))
        values = [row.value if math.isfinite(row.value) else 0.0 for row in rows]
        ax.barh([row.name or "(root)" for row in rows], values)
        ax.invert_yaxis()
        ax.set_xlabel(f"{self.metric} {self.unit}".strip())
        ax.set_title("only this quantized" if self.mode == "only" else "all but this quantized")
        return ax
