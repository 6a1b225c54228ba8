"""What was fused, what was not, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchq.errors import FuseError

__all__ = ["FuseReport", "Fusion", "Refusal"]


@dataclass(frozen=True)
class Fusion:
    """One merge.

    Attributes:
        name: path of the layer or block that carries the result.
        kind: ``"norm after layer"``, ``"norm before layer"`` or the family of a re-parameterised block.
        parts: paths of what was absorbed.
        error: largest difference on random inputs in float64, relative to the largest output.
        found_by: ``"fx"``, ``"recorder"`` or ``"names"``.
        scale: for BatchNorms the largest ``|weight / sqrt(var + eps)|``; a large one (a dead channel) ruins per-tensor ranges.
        spread_before, spread_after: largest over median per-channel magnitude of the weight; None where there was no single weight.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    error: float
    found_by: str
    scale: float | None = None
    spread_before: float | None = None
    spread_after: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A BatchNorm or block that was left alone, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class FuseReport:
    """Result of :func:`torchq.fuse_`; ``print`` shows it as a table.

    Attributes:
        fused: what was merged (with ``dry_run`` or after a failed check: what would have been).
        refused: what was not.
        applied: whether the model was changed.
        error: relative difference of the whole model on the example; None where it was not run.
        tolerance: what ``error`` had to stay below.
        notes: remarks on how the model was followed and compared.
        record: the structure of each fusion, as JSON data; see :func:`torchq.fusion.fusion_record`.
    """

    fused: tuple[Fusion, ...] = ()
    refused: tuple[Refusal, ...] = ()
    applied: bool = False
    error: float | None = None
    tolerance: float | None = None
    notes: tuple[str, ...] = ()
    record: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def max_error(self) -> float:
        """The largest error of a single merge, float64; 0 where nothing was merged."""
        return max((fusion.error for fusion in self.fused), default=0.0)

    def reason(self, name: str) -> str | None:
        """Why ``name`` was refused; None if it was not."""
        return next((refusal.reason for refusal in self.refused if refusal.name == name), None)

    def require_all(self) -> FuseReport:
        """Return the report, or raise where something was refused.

        Raises:
            FuseError: lists every refusal.
        """
        if self.refused:
            listed = "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in self.refused)
            raise FuseError(
                f"fuse_: refused {len(self.refused)}; expected to merge everything. {listed}"
            )
        return self

    def __str__(self) -> str:
        head = f"{len(self.fused)} fused, {len(self.refused)} refused, {'applied' if self.applied else 'model unchanged'}"
        if self.error is not None:
            head += f", whole model off by {self.error:.1e} (limit {self.tolerance:.0e})"
        rows = [
            f"  {f.name or '(root)'}  <- {', '.join(f.parts)}  [{f.kind}, {f.found_by}, error {f.error:.0e}{_spread(f)}]"
            for f in self.fused
        ]
        rows += [f"  {r.name or '(root)'}  refused: {r.reason}" for r in self.refused]
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])


def _spread(fusion: Fusion) -> str:
    if fusion.spread_before is None or fusion.spread_after is None:
        return "" if fusion.spread_after is None else f", spread {fusion.spread_after:.1f}"
    return f", spread {fusion.spread_before:.1f} -> {fusion.spread_after:.1f}"
