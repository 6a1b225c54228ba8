"""What ``verify_onnx`` found: the agreement of parameters, codes and outputs, and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.onnx.coverage import Coverage
from torchq.onnx.verify.exposed import (
    APPROXIMATE_SHARE,
    MERGED_SHARE,
    OPTIMISED,
    Behind,
)
from torchq.utils.text import table

#: How many more, since a small layer has none or a few.
MORE = 3
#: Numbers that are equal but for the order of float sums, as a share of the largest expected one.
EQUAL = 1e-4
#: The same for outputs of layers in shorter types: a few units in the last place.
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Sums that are rounded to a shorter type differ by a unit in its last place or two, which is a
#: part of a code that does not get smaller with the code.
HALF_SHARES = {torch.float16: 0.05, torch.bfloat16: 0.5}
#: Sums and means of codes, whose scales are a simple ratio apart, lie at ties, which this breaks.
HALF_SHARE_OF_SUMS = 0.5
_GOOD_SHARE = 0.999
#: The share of multiply-adds on integers from which on nobody asks why the rest is not.
_MOST = 0.9


@dataclass(frozen=True)
class OutputAgreement:
    """One output of the file in the session that users run, against the model.

    Attributes:
        name: Name in the file.
        equal: Share of samples whose numbers are all within 1e-4 of the largest expected one.
        top1: Share of samples with the same largest entry; None for other outputs than floats of
            shape (batch, classes).
        sqnr_db: Energy of the expected output over energy of the difference, in dB; infinite where
            they are equal. It says little: one code at a tie in one sample may cost half of it.
        max_diff: Largest absolute difference.
        samples: Number of samples.
    """

    name: str
    equal: float
    top1: float | None
    sqnr_db: float
    max_diff: float
    samples: int

    @property
    def ok(self) -> bool:
        """True if 99.9 % of the samples are equal, or have the same largest entry."""
        return max(self.equal, self.top1 or 0.0) >= _GOOD_SHARE

    def __str__(self) -> str:
        agrees = "" if self.top1 is None else f", {self.top1:.2%} top-1"
        samples = f"{self.equal:.1%} of {self.samples} samples equal"
        return f"{self.name}: {samples}{agrees}, largest difference {self.max_diff:.3g}"


@dataclass(frozen=True)
class LayerAgreement:
    """Codes of one quantizer, stored numbers, or an output behind the last codes.

    Attributes:
        name: Dotted path of the quantizer, of a weight's quantizer or of a bias, or
            ``output NAME``.
        elements: Elements compared.
        differ: Codes that differ, where the layers in front got the same codes; stored numbers
            that differ; elements of an output beyond float rounding.
        max_diff: Largest difference, in codes, or in values for an output or a bias.
        allowed: How many may differ, each by ``steps``: a hundred-thousandth of the codes of
            integer layers, more where a float kernel or another runtime computes, and three; in
            another runtime those too that are found halfway between two codes.
        parameters: What differs in scale, zero point or type; empty where nothing does.
        layers: The layers of the file that computed the values from the codes before them.
        steps: By how many codes each may differ; more than one on an emulator alone.
    """

    name: str
    elements: int
    differ: int
    max_diff: float
    allowed: int = 0
    parameters: str = ""
    layers: tuple[str, ...] = ()
    steps: int = 1

    @property
    def ok(self) -> bool:
        """True if no more differs than is allowed, by so many codes, and no parameter does."""
        near = self.max_diff <= self.steps
        few = self.differ == 0 or (self.differ <= self.allowed and near)
        return few and not self.parameters

    def why(self) -> str:
        """Return what differs, in a sentence."""
        if self.parameters:
            return f"{self.name}: {self.parameters}"
        what = f"{self.differ} of {self.elements} differ, by up to {self.max_diff:g}"
        behind = (
            f", computed by {', '.join(self.layers)} or behind" if self.layers else ""
        )
        return f"{self.name}: {what}{behind}"


@dataclass(frozen=True)
class Verdict:
    """One thing that was run, and whether it agrees.

    Attributes:
        what: what was run.
        ok: True if it agrees; None where it could not be run, which is no fault.
        reason: what differs, or why it was not run; where it agrees, why its results are others.
    """

    what: str
    ok: bool | None
    reason: str = ""

    def __str__(self) -> str:
        word = {True: "agrees", False: "DIFFERS", None: "not run"}[self.ok]
        return f"{self.what}: {word}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True)
class RunAgreement:
    """How near one way to run a model is to others, over all batches, at the worst output.

    Attributes:
        what: what was run.
        float_db: energy of the float model's output over that of the difference, in dB.
        simulation_db: the same beside the simulation.
        same_class: share of samples with the class of the float model; None without classes.
        score: the mean of the user's metric; None without one.
    """

    what: str
    float_db: float
    simulation_db: float
    same_class: float | None
    score: float | None = None


def runs_table(runs: Sequence[RunAgreement]) -> str:
    """Return a row for each run."""
    has_classes = any(run.same_class is not None for run in runs)
    has_scores = any(run.score is not None for run in runs)
    heading = ["run", "to float, dB", "to simulation, dB"]
    heading += ["class of float"] * has_classes + ["metric"] * has_scores
    rows = [tuple(heading)]
    for run in runs:
        row = [run.what, f"{run.float_db:.1f}", f"{run.simulation_db:.1f}"]
        row += [_percent(run.same_class)] * has_classes
        row += ["" if run.score is None else f"{run.score:.4g}"] * has_scores
        rows.append(tuple(row))
    return table(rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`torchq.verify_onnx` found; ``print`` it, or its :meth:`table`.

    Attributes:
        path: The file.
        outputs: Every output in a session with default options, against the model.
        layers: Scales, weights, biases and the codes of every quantizer, then every output behind
            the last codes, in the order in which the model calls them; empty where the file has no
            names of quantizers.
        session: What ran the layers.
        hint: What to do where something differs: why, and in a second line the calls, for the
            names ``model`` and ``batches``.
        verdicts: of the file as it is written, of the session that a user opens, and of a second
            length of each open dimension of its inputs.
        coverage: how much of the file reads integers.
        size: bytes of the file's tensors, and those of the same tensors in float32.
        simulation_db: energy of the float model's outputs over that of the difference which
            quantization makes, in dB, for the worst output on the first batch; None where no
            quantizer is on. Outputs of several orders of magnitude, such as boxes beside scores,
            need a metric of their own: see :func:`torchq.doctor`.
        runs: the float model, the simulation, the file on this CPU and on an emulator beside each
            other; empty where no emulator was asked for.
    """

    path: str
    outputs: tuple[OutputAgreement, ...]
    layers: tuple[LayerAgreement, ...]
    session: str = ""
    hint: str = ""
    verdicts: tuple[Verdict, ...] = ()
    coverage: Coverage | None = None
    size: tuple[int, int] = (0, 0)
    simulation_db: float | None = None
    runs: tuple[RunAgreement, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no verdict says otherwise: parameters are equal, and layers but for ties.

        Without layers: True if 99.9 % of the samples have equal outputs, or agree.
        """
        return all(verdict.ok is not False for verdict in self.verdicts)

    @property
    def shows_session(self) -> bool:
        """True if layers are those of the session that users open, as it has optimised them."""
        return self.session.startswith(OPTIMISED)

    @property
    def first(self) -> LayerAgreement | None:
        """The first layer, in the order of the model, that differs by more than is allowed."""
        return next((layer for layer in self.layers if not layer.ok), None)

    def __str__(self) -> str:
        lines = [f"{self.path}: {'agrees with its model' if self.ok else 'DIFFERS'}"]
        lines += [f"  {line}" for line in self._head()]
        lines += [f"  output {output}" for output in self.outputs]
        if self.layers:
            codes = [layer for layer in self.layers if layer.allowed]
            counts = f"{sum(x.differ for x in codes)} of {sum(x.elements for x in codes)} codes"
            lines.append(f"  {len(codes)} quantizers, {self.session}: {counts} differ")
        lines += [f"  {verdict}" for verdict in self.verdicts]
        first = self.first
        wrong = sum(not layer.ok for layer in self.layers)
        if first is not None:
            rest = "; print(report.table()) has all rows"
            lines.append(f"  first of {wrong} that differ: {first.why()}{rest}")
        if self.hint and not self.ok:
            why, *code = self.hint.splitlines()
            lines += [f"  next: {why}", *(f"    {line}" for line in code)]
        elif not self.layers and not self.ok:
            lines.append(
                "  next: export with torchq.export_onnx, whose files name every layer"
            )
        if self.runs:
            lines += [f"  {line}" for line in runs_table(self.runs).splitlines()]
        return "\n".join(lines)

    def _head(self) -> Iterator[str]:
        """Yield what the agreement alone does not say: how near to float, and how much is INT8."""
        if self.simulation_db is not None:
            decibels = (
                f"{self.simulation_db:.1f} dB on the first batch, at the worst output"
            )
            yield f"the simulation beside the float model: {decibels}"
        if self.coverage is None:
            return
        stored, as_float = self.size
        size = f"; its tensors have {stored / as_float:.0%} of their size in float32"
        yield f"{self.coverage}{size if as_float else ''}"
        if self.coverage.share is not None and self.coverage.share < _MOST:
            what = "the rest" if self.coverage.on_integers else "this file"
            yield f"{what} computes in float: {self.coverage.reason}"

    def table(self) -> str:
        """Return a row for each scale, weight, bias and quantizer, in the order of the model."""
        rows = [
            (
                "what",
                "elements",
                "differ",
                "allowed",
                "max diff",
                "parameters",
                "layers",
            )
        ]
        for x in self.layers:
            figures = (
                str(x.elements),
                str(x.differ),
                str(x.allowed),
                f"{x.max_diff:g}",
            )
            rows.append((x.name, *figures, x.parameters, ", ".join(x.layers)))
        return table(rows)


class Output:
    """The agreement of one output, accumulated over batches."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._signal = 0.0
        self._noise = 0.0
        self._max = 0.0
        self._equal = self._samples = self._same = self._counted = 0

    def add(self, want: Tensor, got: Tensor) -> None:
        """Add one batch."""
        gap = difference(want, got)
        self._signal += float(want[want.isfinite()].double().square().sum())
        self._noise += float(gap.square().sum())
        self._max = max(self._max, float(gap.max()) if want.numel() else 0.0)
        samples = len(want) if want.dim() else 1
        is_equal = gap <= allowed_gap(want, EQUAL)
        # A detector may find nothing: rows without a number, or no row.
        rows = is_equal.reshape(samples, *want.shape[1:], 1).flatten(1)
        self._equal += int(rows.all(1).sum())
        self._samples += samples
        if want.dim() == 2 and want.shape[1] > 1 and want.is_floating_point():
            self._same += int((want.argmax(1) == got.argmax(1)).sum())
            self._counted += len(want)

    def result(self) -> OutputAgreement:
        """Return the figures over all batches."""
        return OutputAgreement(
            self._name,
            self._equal / self._samples if self._samples else 1.0,
            self._same / self._counted if self._counted else None,
            decibels(self._signal, self._noise),
            self._max,
            self._samples,
        )


def add_outputs(
    outputs: Sequence[Output], expected: list[Tensor], found: list[Tensor]
) -> None:
    """Add one batch of all outputs, in their order."""
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (expected, found)]
    if shapes[0] != shapes[1]:
        raise ExportError(
            f"verify_onnx: the model returns {shapes[0]}, the file {shapes[1]}; "
            f"expected equal shapes. {_advice_on_shapes(*shapes)}"
        )
    for output, want, got in zip(outputs, expected, found, strict=True):
        output.add(want, got)


def _advice_on_shapes(
    want: Sequence[Sequence[int]], got: Sequence[Sequence[int]]
) -> str:
    """Return what to do about shapes that are not equal."""
    if [shape[1:] for shape in want] == [shape[1:] for shape in got]:
        return (
            "How many rows there are may depend on the data, as where a detector chooses boxes by "
            "scores, of which equal ones come in any order: export and verify a torch.nn.Module "
            "around the layers in front of the choice. Else export again"
        )
    return "Export again"


def difference(want: Tensor, got: Tensor) -> Tensor:
    """Return the sizes of differences; equal infinities and NaNs have none, others are infinite."""
    want, got = want.double(), got.double()
    same = (want == got) | (want.isnan() & got.isnan())
    return torch.where(same, 0.0, (got - want).abs()).nan_to_num(
        math.inf, posinf=math.inf
    )


def allowed_gap(want: Tensor, share: float) -> float:
    """Return a share of the largest finite number."""
    finite = want[want.isfinite()].abs()
    return share * float(finite.max()) if finite.numel() else 0.0


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; infinite without noise."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


class Codes:
    """The agreement of one quantizer's codes, or of an output, accumulated over batches."""

    def __init__(
        self,
        name: str,
        parameters: str,
        behind: Behind,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._fixed = (parameters, behind.layers, behind.steps)
        computed = {
            behind.dtype,
            *(dtypes[layer] for layer in behind.layers if layer in dtypes),
        }
        self._half = next((dtype for dtype in computed if dtype in ROUNDING), None)
        self.name = name
        self._elements = 0
        self._differ = 0
        self._max = 0.0
        self._at_ties = 0
        self._least = behind.share
        self._rounding = behind.rounding
        self._share = 0.0
        #: Code of the model and of the file -> how often one stands for the other, where all
        #: values are a function of codes: one input code at a border is found many times.
        self._pairs: Counter[tuple[float, float]] = Counter()
        #: The smallest and the largest code of the model, where clipped values lie, at no border.
        self._ends = (math.inf, -math.inf)
        is_pointwise = behind.share in (APPROXIMATE_SHARE, MERGED_SHARE)
        self._is_of_codes = not behind.layers and is_pointwise

    def add(
        self,
        expected: Tensor,
        found: Tensor,
        dtype: torch.dtype,
        at_tie: Tensor | None = None,
    ) -> None:
        """Add codes of one batch.

        Args:
            expected: of the model.
            found: in the file.
            dtype: of the values; the layers may have a shorter one.
            at_tie: where the values lie halfway between two codes, either of which is right.
        """
        if expected.shape != found.shape:
            shapes = [tuple(expected.shape)], [tuple(found.shape)]
            raise ExportError(
                f"{self.name}: the model has shape {shapes[0][0]}, the file {shapes[1][0]}; "
                f"expected the same. {_advice_on_shapes(*shapes)}"
            )
        gap = difference(expected, found)
        self._count(gap, 0.0)
        is_next = gap == 1
        if at_tie is not None:
            self._at_ties += int((is_next & at_tie).sum())
        if self._is_of_codes:
            pairs = zip(
                expected[is_next].tolist(), found[is_next].tolist(), strict=True
            )
            self._pairs.update(pairs)
            if expected.numel():
                least, most = self._ends
                self._ends = (
                    min(least, float(expected.min())),
                    max(most, float(expected.max())),
                )
        half = HALF_SHARES.get(self._half or dtype)
        of_codes = not self._fixed[1]
        if half is not None and of_codes and self._least >= MERGED_SHARE:
            half = HALF_SHARE_OF_SUMS
        self._share = self._least if half is None else half

    def add_output(self, expected: Tensor, found: Tensor) -> None:
        """Add one batch of an output; elements beyond float rounding differ."""
        share = ROUNDING.get(self._half or expected.dtype, EQUAL)
        least = max(allowed_gap(expected.double(), share), self._rounding)
        self._count(difference(expected, found), least)

    def _count(self, gap: Tensor, least: float) -> None:
        self._elements += gap.numel()
        self._differ += int((gap > least).sum())
        self._max = max(self._max, float(gap.max()) if gap.numel() else 0.0)

    def result(self) -> LayerAgreement:
        """Return the counts over all batches."""
        allowed = MORE + int(self._share * self._elements) if self._share else 0
        inside = [n for (code, _), n in self._pairs.items() if code not in self._ends]
        allowed += max(inside, default=1) - 1 + self._at_ties
        return LayerAgreement(
            self.name, self._elements, self._differ, self._max, allowed, *self._fixed
        )
