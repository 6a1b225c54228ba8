"""The report of ``fuse_``: what was fused, what was not, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchq.errors import FuseError
from torchq.utils import listed, wrap

_INDENT = "      "  # of the later lines of a row that is wider than the terminal
_SCREEN = 12  # rows of which each one is shown


@dataclass(frozen=True)
class Fusion:
    """One merge.

    Attributes:
        name: path of the layer or block that carries the result.
        kind: ``"norm after layer"``, ``"norm before layer"`` or the family of a
            re-parameterised block.
        parts: paths of the modules that were merged into it.
        error: largest difference, relative to the largest output: of a float layer on random inputs
            in float64; of a quantized layer on its input in the model, where there is an example.
        found_by: ``"fx"``, ``"recorder"`` or ``"names"``.
        scale: for BatchNorms the largest ``|weight / sqrt(var + eps)|``; a large one (a dead
            channel) ruins per-tensor ranges.
        codes: how many codes the weight of a quantized layer has; 0 for a float layer.
        changed: how many of them are others now, but for their sign.
        remarks: what else there is to know.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    error: float
    found_by: str
    scale: float | None = None
    codes: int = 0
    changed: int = 0
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one row of the report."""
        details = f"{self.kind}, {self.found_by}, error {self.error:.0e}"
        return f"{self.name or '(root)'}  <- {', '.join(self.parts)}  [{details}]"


@dataclass(frozen=True)
class Refusal:
    """A BatchNorm or block that was left as it is, and the reason.

    Attributes:
        name: its path.
        reason: why merging it would not be exact, or not safe.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        """Return one row of the report."""
        return f"{self.name or '(root)'}  refused: {self.reason}"


@dataclass(frozen=True)
class FuseReport:
    """The result of :func:`torchq.fuse_`; ``print`` shows it as a table.

    Attributes:
        fused: what was merged (with ``dry_run`` or after a failed check: what would have been).
        refused: what was not merged.
        applied: the model was changed.
        error: relative difference of the whole model on the example; None where it was not run.
        tolerance: the limit of ``error``; None for a quantized model, in which ties between two
            codes decide how large it is, so that it refuses nothing.
        notes: remarks on how the model was followed and compared.
        record: the structure of each fusion, as JSON data; see
            :func:`torchq.fusion.fusion_record`.
    """

    fused: tuple[Fusion, ...] = ()
    refused: tuple[Refusal, ...] = ()
    applied: bool = False
    error: float | None = None
    tolerance: float | None = None
    notes: tuple[str, ...] = ()
    record: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def reason(self, name: str) -> str | None:
        """Return why the module at path ``name`` was refused; None if it was not."""
        return next(
            (refusal.reason for refusal in self.refused if refusal.name == name), None
        )

    def require_all(self) -> FuseReport:
        """Return the report, or raise if something was refused.

        Raises:
            FuseError: the text lists every refusal.
        """
        if self.refused:
            listed = "; ".join(
                f"{refusal.name}: {refusal.reason}" for refusal in self.refused
            )
            raise FuseError(
                f"fuse_: refused {len(self.refused)}; expected to merge everything. {listed}"
            )
        return self

    def verdict(self) -> str:
        """Return what was done, in one line."""
        head = f"{len(self.fused)} fused, {len(self.refused)} refused, {self._state()}"
        if codes := sum(fusion.codes for fusion in self.fused):
            changed = sum(fusion.changed for fusion in self.fused)
            head += f", {changed or 'none'} of {codes:,} weight codes changed"
        if self.error is None:
            return head
        if self.tolerance is None:
            return (
                f"{head}, whole model differs by {self.error:.1e} (ties between codes)"
            )
        return (
            f"{head}, whole model off by {self.error:.1e} (limit {self.tolerance:.0e})"
        )

    def table(self) -> str:
        """Return the verdict and a row for each merge, refusal and note."""
        rows = [f"  {row}" for row in (*self.fused, *self.refused)]
        remarks = [f"{f.name}: {remark}" for f in self.fused for remark in f.remarks]
        rows += [f"  note: {note}" for note in (*remarks, *self.notes)]
        return "\n".join(wrap(row, indent=_INDENT) for row in (self.verdict(), *rows))

    def __str__(self) -> str:
        """Return the verdict and what stands out: refusals and remarks, those alike in one row.

        A short report is the whole :meth:`table`.
        """
        if len(self.fused) + len(self.refused) <= _SCREEN:
            return self.table()
        refusals: dict[str, list[str]] = {}
        for refusal in self.refused:
            refusals.setdefault(f"refused: {refusal.reason}", []).append(refusal.name)
        remarks: dict[str, list[str]] = {}
        for fusion in self.fused:
            for remark in fusion.remarks:
                remarks.setdefault(f"note: {remark}", []).append(fusion.name)
        rows = [f"  {listed(names)}  {reason}" for reason, names in refusals.items()]
        rows += [f"  {listed(names)}  {remark}" for remark, names in remarks.items()]
        rows += [f"  note: {note}" for note in self.notes]
        if len(rows) > _SCREEN:
            rows = [
                *rows[: _SCREEN - 1],
                f"  and {len(rows) - _SCREEN + 1} rows of table()",
            ]
        return "\n".join(wrap(row, indent=_INDENT) for row in (self.verdict(), *rows))

    def _state(self) -> str:
        """Return what became of the model, with the cause where merges were not applied."""
        if self.applied:
            return "applied"
        if not self.fused:
            return "model unchanged"
        is_compared = self.error is not None and self.tolerance is not None
        failed = is_compared and not (self.error or 0.0) <= (self.tolerance or 0.0)
        return f"model unchanged ({'comparison failed' if failed else 'dry run'})"
