"""The errors of layers: rows, their text, and their picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torchq.analysis.layer_errors.quantizer_statistics import QuantizerRow
from torchq.analysis.noise import relative_error
from torchq.analysis.plotting import draw_errors
from torchq.analysis.tables import bar, decibel_text, html_table, percent_text, plain_number
from torchq.utils import table

__all__ = ["LayerError", "LayerErrors"]


@dataclass(frozen=True)
class LayerError:
    """The error of one layer.

    The *local* error is that of the layer alone, with the input of the float model. The
    *accumulated* error is that of its output in the quantized model, with all that came before.

    Attributes:
        name: its dotted path.
        kind: its float class.
        local_sqnr: signal to noise ratio of the local error, in dB.
        sqnr: signal to noise ratio of the accumulated error, in dB.
        local_cosine: cosine between float and local output.
        cosine: cosine between float and quantized output.
        local_max_error: the largest local error of one element.
        max_error: the largest accumulated error of one element.
        born: power of the local error over that of the accumulated one. Near 1 and above, the
            error is born here; near 0, the layer passes on what others made.
        clipped: share of its input elements beyond the range, 0 to 1.
        quantizers: what each of its quantizers did.
    """

    name: str
    kind: str
    local_sqnr: float
    sqnr: float
    local_cosine: float
    cosine: float
    local_max_error: float
    max_error: float
    born: float
    clipped: float
    quantizers: tuple[QuantizerRow, ...]

    @property
    def used_codes(self) -> int:
        """The fewest distinct codes that one of its quantizers used; 0 where none was counted."""
        return min((q.used_codes for q in self.quantizers if q.codes), default=0)

    @property
    def dead_channels(self) -> int:
        """Channels of its tensors that quantization made 0."""
        return sum(q.dead_channels for q in self.quantizers)


@dataclass(frozen=True)
class LayerErrors:
    """The errors of all layers, in the order in which the model calls them; ``print`` it.

    Attributes:
        rows: one for each layer that was called.
        output_sqnr: signal to noise ratio of the outputs of the model, in dB.
        batches: how many were run.
        unseen: layers that no batch reached.
    """

    rows: tuple[LayerError, ...]
    output_sqnr: float
    batches: int
    unseen: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[LayerError, ...]:
        """The rows, those with the lowest local SQNR first: where error is born; NaN is lowest."""

        def ratio(row: LayerError) -> float:
            return -math.inf if math.isnan(row.local_sqnr) else row.local_sqnr

        return tuple(sorted(self.rows, key=lambda row: (ratio(row), row.name)))

    @property
    def first_not_finite(self) -> LayerError | None:
        """The first row whose layer returned NaN or infinity; None if none did."""
        return next((row for row in self.rows if math.isnan(row.sqnr + row.local_sqnr)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; None stands for what is infinite or not a number."""
        return _plain(asdict(self))

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("layer", "type", "local SQNR", "SQNR", "cosine", "born here", "clipped", "codes")
        rows: list[tuple[str, ...]] = [(*head, "dead")]
        for row in self.rows:
            codes = str(row.used_codes) if row.used_codes else ""
            figures = (decibel_text(row.local_sqnr), decibel_text(row.sqnr), f"{row.cosine:.5f}")
            rest = (bar(row.born, 10), percent_text(row.clipped), codes, str(row.dead_channels))
            rows.append((row.name or "(root)", row.kind, *figures, *rest))
        return rows

    def _ending(self) -> str:
        worst, broken = self.worst[0], self.first_not_finite
        text = f"output {decibel_text(self.output_sqnr)}; "
        if broken is None:
            text += f"most error is born in {worst.name}"
            text += f" ({decibel_text(worst.local_sqnr)} by itself)"
        else:
            text += f"NaN or infinity comes first from {broken.name or '(root)'}: look at its "
            text += "weight, its bias and what it is given"
        return text + (f"; not reached: {', '.join(self.unseen)}" if self.unseen else "")

    def __str__(self) -> str:
        return f"{table(self._cells())}\n{self._ending()}"

    def _repr_html_(self) -> str:
        return html_table(self._cells(), self._ending())

    def plot(self, ax: Any = None) -> Any:
        """Draw the local and the accumulated error along the network with matplotlib.

        Args:
            ax: axes to draw on; default new ones.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        names = [row.name or "(root)" for row in self.rows]
        errors = {
            "born in the layer": [relative_error(row.local_sqnr) for row in self.rows],
            "in the quantized model": [relative_error(row.sqnr) for row in self.rows],
        }
        return draw_errors(ax, names, errors)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return plain_number(value) if isinstance(value, float) else value
