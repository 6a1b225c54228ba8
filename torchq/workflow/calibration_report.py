"""What one calibration did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchq.utils import NotebookText, table

__all__ = ["CalibrationReport"]


@dataclass(frozen=True)
class CalibrationReport(NotebookText):
    """What one call of :func:`calibrate` did.

    Attributes:
        batches: batches that ran through the model.
        ranges: path of each quantizer that got a range -> its smallest and its largest amax, or the
            ends of an asymmetric range.
        kept: paths of the quantizers that kept a range they had before.
        unseen: paths of the quantizers that no batch reached.
        methods: path of each quantizer whose calibration method was chosen -> the method.
        signs: path of each quantizer that chose the sign of its codes (``unsigned="auto"``) ->
            ``"unsigned"`` or ``"signed"``.
    """

    batches: int
    ranges: Mapping[str, tuple[float, float]]
    kept: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    signs: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("quantizer", "amax")]
        for name, (smallest, largest) in self.ranges.items():
            one = smallest == largest
            text = f"{largest:.4g}" if one else f"{smallest:.4g} .. {largest:.4g}"
            chosen = [c[name] for c in (self.methods, self.signs) if name in c]
            rows.append((name, f"{text} ({', '.join(chosen)})" if chosen else text))
        rows += [(name, "no data reached it") for name in self.unseen]
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        end = f"{len(self.ranges)} ranges from {batches}"
        if self.kept:
            end += f", {len(self.kept)} kept from before"
        return f"{table(rows)}\n{end}"
