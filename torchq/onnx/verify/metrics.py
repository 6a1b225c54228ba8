"""Measures of agreement between a model and its file, accumulated over batches, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.runtime import reference_runtime
from torchq.utils.text import table

#: Agreement of an expected and a found output, both of one batch: a number between 0 and 1, or a
#: tensor with one number (or truth value) for each sample.
Measure: TypeAlias = Callable[[Tensor, Tensor], "Tensor | float"]
#: Two codes count as a tie where the value lies this close to the border between them, as a share
#: of the largest code: float32 sums in another order differ by about 1e-6 of their largest terms.
#: Sums that are rounded to a shorter type differ by a unit in its last place or two.
TIE, TIE_UNITS = 1e-5, 2
#: Outputs computed from equal codes differ by the order of float sums alone, as a share of the
#: largest expected value: about 1e-6 in float32, 1e-3 in float16, 1e-2 in bfloat16.
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDING_FLOAT32 = 1e-4
_GOOD_DB, _GOOD_SHARE = 40, 0.999


@dataclass(frozen=True)
class OutputAgreement:
    """One output of the model.

    Attributes:
        name: Name in the file.
        share: Agreement in the sense of the measure, between 0 and 1; None where there is none.
        sqnr_db: Energy of the expected output over energy of the difference, in dB; infinite where
            they are equal.
        max_diff: Largest absolute difference.
        samples: Number of samples that ``share`` counts, or of elements.
        measure: What ``share`` is: "top-1" for float outputs of shape (batch, classes), the name
            of the function that was passed, or "" without a measure.
    """

    name: str
    share: float | None
    sqnr_db: float
    max_diff: float
    samples: int
    measure: str = ""

    @property
    def top1(self) -> float | None:
        """Share of samples with the same largest entry; None for outputs that are no logits."""
        return self.share if self.measure == "top-1" else None

    @property
    def ok(self) -> bool:
        """True if the outputs are within 40 dB, or agree on 99.9 % in the sense of the measure."""
        return self.sqnr_db >= _GOOD_DB or (self.share or 0) >= _GOOD_SHARE


@dataclass(frozen=True)
class LayerAgreement:
    """The codes of one quantizer, or an output that was computed from the model's own codes.

    Attributes:
        name: Dotted path of the quantizer, or ``output NAME``.
        elements: Elements compared.
        ties: Codes that differ where the value lies on the border of the two.
        mismatches: Codes that differ elsewhere; elements of an output beyond float rounding.
        max_diff: Largest difference, in codes, or in values for an output.
        parameters: What differs in scale, zero point or type from what the model or its target
            says; empty where nothing does.
        layers: The layers of the file that computed the values from the codes before them.
    """

    name: str
    elements: int
    ties: int
    mismatches: int
    max_diff: float
    parameters: str = ""
    layers: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing differs but ties."""
        return not self.mismatches and not self.parameters

    def badness(self) -> tuple[bool, float, float]:
        """Return a key for sorting: a wrong parameter, the share of mismatches, that of ties."""
        count = max(self.elements, 1)
        return bool(self.parameters), self.mismatches / count, self.ties / count


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`torchq.verify_onnx` found; ``print`` it.

    Attributes:
        path: The file.
        outputs: The graph as written, computed in float, against the simulation with the types of
            the file's target: the same arithmetic.
        unaltered: The graph as written against the model as it is.
        optimized: The file with ONNX Runtime's optimisations, on integers, against the simulation;
            empty where it cannot optimise the file.
        layers: Every quantizer, the worst first; empty where the file has no names of quantizers.
        last_layers: Every output, computed from the model's own codes: what the layers behind the
            last quantizers do. Empty where ``layers`` is.
        misread: Outputs of a file for ONNX Runtime that its optimisations change by more than small
            changes of the inputs explain: it computes something else than the file says.
    """

    path: str
    outputs: tuple[OutputAgreement, ...]
    unaltered: tuple[OutputAgreement, ...]
    optimized: tuple[OutputAgreement, ...]
    layers: tuple[LayerAgreement, ...]
    last_layers: tuple[LayerAgreement, ...] = ()
    misread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if all codes are equal except ties, and all outputs follow from them.

        Without layers: True if every output is within 40 dB of the model, or agrees on 99.9 %.
        False if ONNX Runtime's optimisations compute something else.
        """
        if self.misread:
            return False
        if self.layers:
            return all(layer.ok for layer in (*self.layers, *self.last_layers))
        return all(output.ok for output in self.unaltered)

    @property
    def top1(self) -> float | None:
        """Top-1 agreement of the first output, unoptimised."""
        return self.outputs[0].top1 if self.outputs else None

    def __str__(self) -> str:
        rows = [("output", "runs", "measure", "agrees", "SQNR dB", "max diff")]
        runs = (
            ("unoptimised", self.outputs),
            ("against the model as it is", self.unaltered),
            ("optimised", self.optimized),
        )
        for run, outputs in runs:
            for o in outputs:
                share = "" if o.share is None else f"{o.share:.2%}"
                figures = (f"{o.sqnr_db:.1f}", f"{o.max_diff:.3g}")
                rows.append((o.name, run, o.measure, share, *figures))
        lines = [f"{self.path}: {'agrees' if self.ok else 'DIFFERS'}", table(rows)]
        if self.misread:
            names, name = ", ".join(self.misread), reference_runtime().name
            lines.append(
                f"the optimisations of {name} compute something else: {names}; export with "
                f"target={name!r}, or report the fault to its maintainers"
            )
        return "\n".join([*lines, *self._layer_lines()])

    def _layer_lines(self) -> list[str]:
        rows_in_order = sorted(
            (*self.layers, *self.last_layers), key=LayerAgreement.badness, reverse=True
        )
        worst = [layer for layer in rows_in_order if not layer.ok or layer.ties][:10]
        rest = len([layer for layer in self.layers if layer not in worst])
        lines = []
        if worst:
            rows = [("quantizer", "codes", "wrong", "ties", "max diff", "parameters", "layers")]
            for x in worst:
                figures = (str(x.elements), str(x.mismatches), str(x.ties), f"{x.max_diff:g}")
                rows.append((x.name, *figures, x.parameters, ", ".join(x.layers)))
            lines.append(table(rows))
        if rest and worst:
            lines.append(f"{rest} more quantizers, no worse than these")
        elif rest:
            lines.append(f"{rest} quantizers: all codes equal")
        return lines


class Outputs:
    """The agreement of the outputs, accumulated over batches."""

    def __init__(self, names: Sequence[str], measure: Measure | None = None) -> None:
        self.names, self._measure = list(names), measure
        self._signal, self._noise, self._max, self._same = ([0.0] * len(names) for _ in range(4))
        self._samples, self._elements = ([0] * len(names) for _ in range(2))

    def add(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Add one batch; tensors in the order of the names."""
        shapes = [[tuple(t.shape) for t in tensors] for tensors in (expected, found)]
        if shapes[0] != shapes[1]:
            raise ExportError(
                f"verify_onnx: the model returns {shapes[0]}, the file {shapes[1]}; "
                "expected equal shapes. Export again"
            )
        for i, (want, got) in enumerate(zip(expected, found, strict=True)):
            self._count(i, want, got)
            want, got = want.double(), got.double()
            difference = torch.where(want == got, 0.0, got - want)  # Equal infinities are equal.
            self._signal[i] += float(want[want.isfinite()].square().sum())
            self._noise[i] += float(difference.square().sum())
            self._max[i] = max(self._max[i], float(difference.abs().max()) if want.numel() else 0.0)
            self._elements[i] += want.numel()

    def _count(self, i: int, want: Tensor, got: Tensor) -> None:
        if self._measure is not None:
            share = torch.as_tensor(self._measure(want, got)).double()
            count = share.numel() if share.dim() else max(len(want), 1)
            self._same[i] += float(share.mean()) * count
            self._samples[i] += count
        elif _is_logits(want):
            self._same[i] += int((want.argmax(1) == got.argmax(1)).sum())
            self._samples[i] += len(want)

    def result(self) -> tuple[OutputAgreement, ...]:
        """Return the figures over all batches."""
        name = "top-1"
        if self._measure is not None:
            name = getattr(self._measure, "__name__", type(self._measure).__name__)
        found = []
        for i, output in enumerate(self.names):
            counted = self._samples[i]
            found.append(
                OutputAgreement(
                    output,
                    self._same[i] / counted if counted else None,
                    decibels(self._signal[i], self._noise[i]),
                    self._max[i],
                    counted or self._elements[i],
                    name if counted else "",
                )
            )
        return tuple(found)


def _is_logits(x: Tensor) -> bool:
    """Return True for a float tensor of shape (batch, classes)."""
    return x.dim() == 2 and x.shape[1] > 1 and x.is_floating_point()


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; infinite without noise."""
    if noise == 0:
        return math.inf
    if math.isnan(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


class Codes:
    """The agreement of one quantizer's codes, accumulated over batches."""

    def __init__(
        self,
        name: str,
        qmax: float,
        parameters: str = "",
        layers: tuple[str, ...] = (),
        dtypes: tuple[torch.dtype, ...] = (),
    ) -> None:
        self.name, self._qmax, self._dtypes = name, qmax, dtypes
        self._parameters, self._layers = parameters, layers
        self._elements = self._ties = self._wrong = 0
        self._max = 0.0

    def add(
        self,
        value: Tensor,
        expected: Tensor,
        found: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Add one batch."""
        if expected.shape != found.shape:
            raise ExportError(
                f"{self.name}: the model has shape {tuple(expected.shape)}, "
                f"the file {tuple(found.shape)}; expected the same"
            )
        # A learned range has a gradient.
        value, expected, found = (t.detach().float() for t in (value, expected, found))
        gap = (found - expected).abs()
        differs = ~(gap == 0)  # Also where a code is NaN.
        unit = max(torch.finfo(each).eps for each in (dtype, *self._dtypes))
        border = self._qmax * max(TIE, TIE_UNITS * unit)
        tie = differs & ((value - (found + expected) / 2).abs() <= border)
        self._count(gap, int(tie.sum()), int((differs & ~tie).sum()))

    def add_output(self, expected: Tensor, found: Tensor) -> None:
        """Add one batch of an output; elements beyond float rounding are mismatches."""
        dtypes = (expected.dtype, *self._dtypes)
        share = max(ROUNDING.get(dtype, ROUNDING_FLOAT32) for dtype in dtypes)
        want, got = expected.double(), found.double()
        finite = want[want.isfinite()].abs()
        allowed = share * float(finite.max()) if finite.numel() else 0.0
        same = (want == got) | (want.isnan() & got.isnan())
        gap = torch.where(same, 0.0, (got - want).abs())
        self._count(gap, 0, int((~(gap <= allowed)).sum()))

    def _count(self, gap: Tensor, ties: int, wrong: int) -> None:
        self._elements += gap.numel()
        self._ties += ties
        self._wrong += wrong
        largest = float(gap.nan_to_num(math.inf).max()) if gap.numel() else 0.0
        self._max = max(self._max, largest)

    def result(self) -> LayerAgreement:
        """Return the counts over all batches."""
        return LayerAgreement(
            self.name,
            self._elements,
            self._ties,
            self._wrong,
            self._max,
            self._parameters,
            self._layers,
        )
