"""How well two computations agree: accumulated over batches, reported as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.errors import ExportError

__all__ = ["Codes", "LayerAgreement", "OutputAgreement", "Outputs", "VerifyReport", "table"]

#: Two codes count as a tie where the value lies this close to the border between them, as a share of the largest code: float32 sums in
#: another order differ by about 1e-6 of their largest terms.
TIE = 1e-5


@dataclass(frozen=True)
class OutputAgreement:
    """One output of the model.

    Attributes:
        name: in the file.
        top1: share of positions where the largest entry along dimension 1 is the same one; None without such a dimension.
        sqnr_db: energy of the expected output over energy of the difference, in dB; infinite where they are equal.
        max_diff: largest absolute difference.
        samples: positions that ``top1`` counts, or elements.
    """

    name: str
    top1: float | None
    sqnr_db: float
    max_diff: float
    samples: int


@dataclass(frozen=True)
class LayerAgreement:
    """The codes of one quantizer.

    Attributes:
        name: dotted path.
        elements: compared.
        ties: codes that differ where the value lies on the border of the two.
        mismatches: codes that differ elsewhere.
        max_diff: largest difference, in codes.
    """

    name: str
    elements: int
    ties: int
    mismatches: int
    max_diff: float

    def badness(self) -> tuple[float, float]:
        """For sorting: share of mismatches, then of ties."""
        count = max(self.elements, 1)
        return self.mismatches / count, self.ties / count


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`torchq.verify_onnx` found.

    Attributes:
        path: the file.
        outputs: the graph as written, computed in float: the arithmetic of the simulation.
        optimized: the same file with ONNX Runtime's optimisations, on integers; empty where it cannot optimise the file.
        layers: every quantizer in the file, the worst first.
    """

    path: str
    outputs: tuple[OutputAgreement, ...]
    optimized: tuple[OutputAgreement, ...]
    layers: tuple[LayerAgreement, ...]

    @property
    def ok(self) -> bool:
        """Whether all codes are equal except ties. Without layers: whether every output is within 40 dB or has the same top-1."""
        if self.layers:
            return not any(layer.mismatches for layer in self.layers)
        return all(o.sqnr_db >= 40 or (o.top1 or 0) >= 0.999 for o in self.outputs)

    @property
    def top1(self) -> float | None:
        """Top-1 agreement of the first output, unoptimised."""
        return self.outputs[0].top1 if self.outputs else None

    def __str__(self) -> str:
        rows = [("output", "runs", "top-1", "SQNR dB", "max diff")]
        for how, outputs in (("unoptimised", self.outputs), ("optimised", self.optimized)):
            for o in outputs:
                top1 = "" if o.top1 is None else f"{o.top1:.2%}"
                rows.append((o.name, how, top1, f"{o.sqnr_db:.1f}", f"{o.max_diff:.3g}"))
        lines = [f"{self.path}: {'agrees' if self.ok else 'DIFFERS'}", *table(rows)]
        if self.layers:
            worst = [layer for layer in self.layers if layer.mismatches or layer.ties][:10]
            rest = len(self.layers) - len(worst)
            cells = [
                (x.name, str(x.elements), str(x.mismatches), str(x.ties), f"{x.max_diff:g}")
                for x in worst
            ]
            if worst:
                lines += table([("quantizer", "codes", "wrong", "ties", "max diff"), *cells])
            if rest:
                lines.append(
                    f"{rest} more quantizers, no worse than these"
                    if worst
                    else f"{rest} quantizers: all codes equal"
                )
        return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class Outputs:
    """Accumulates the outputs of batches."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._signal, self._noise, self._max = ([0.0] * len(names) for _ in range(3))
        self._same, self._positions, self._elements = ([0] * len(names) for _ in range(3))

    def add(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """One batch; tensors in the order of the names.

        Raises:
            ExportError: another number of outputs, or another shape.
        """
        shapes = [[tuple(t.shape) for t in tensors] for tensors in (expected, found)]
        if shapes[0] != shapes[1]:
            raise ExportError(
                f"verify_onnx: the model returns {shapes[0]}, the file {shapes[1]}; expected equal shapes. Export again"
            )
        for i, (want, got) in enumerate(zip(expected, found, strict=True)):
            want, got = want.double(), got.double()
            difference = torch.where(want == got, 0.0, got - want)  # equal infinities are equal
            self._signal[i] += float(want[want.isfinite()].square().sum())
            self._noise[i] += float(difference.square().sum())
            self._max[i] = max(self._max[i], float(difference.abs().max()) if want.numel() else 0.0)
            self._elements[i] += want.numel()
            if want.dim() > 1 and want.shape[1] > 1:
                same = want.argmax(1) == got.argmax(1)
                self._same[i] += int(same.sum())
                self._positions[i] += same.numel()

    def result(self) -> tuple[OutputAgreement, ...]:
        """The figures over all batches."""
        return tuple(
            OutputAgreement(
                name,
                self._same[i] / self._positions[i] if self._positions[i] else None,
                decibels(self._signal[i], self._noise[i]),
                self._max[i],
                self._positions[i] or self._elements[i],
            )
            for i, name in enumerate(self.names)
        )


def decibels(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)``; infinite without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


class Codes:
    """Accumulates the codes of one quantizer."""

    def __init__(self, name: str, qmax: float) -> None:
        self.name, self._border = name, TIE * qmax
        self._elements = self._ties = self._wrong = 0
        self._max = 0.0

    def add(self, value: Tensor, expected: Tensor, found: Tensor) -> None:
        """One batch: the values in scales before rounding, the codes of the model, and those of the file."""
        if expected.shape != found.shape:
            raise ExportError(
                f"{self.name}: the model has shape {tuple(expected.shape)}, the file {tuple(found.shape)}; expected the same"
            )
        value, expected, found = (
            value.detach(),
            expected.detach(),
            found.detach(),
        )  # a learned range has a gradient
        gap = (found - expected).abs()
        differs = (gap > 0) | found.isnan()
        tie = differs & ((value - (found + expected) / 2).abs() <= self._border)
        self._elements += expected.numel()
        self._ties += int(tie.sum())
        self._wrong += int((differs & ~tie).sum())
        self._max = max(self._max, float(gap.max()) if gap.numel() else 0.0)

    def result(self) -> LayerAgreement:
        """The counts over all batches."""
        return LayerAgreement(self.name, self._elements, self._ties, self._wrong, self._max)
