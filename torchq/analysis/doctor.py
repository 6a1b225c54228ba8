"""What is wrong with a quantized model, and the call that mends it."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.analysis.checks import (
    CHECKS,
    SEVERITIES,
    Finding,
    Patient,
    Severity,
    damage,
    exceeded,
    observe,
    range_spread,
)
from torchq.analysis.cures import Cure, Figures, cures, damage_shares
from torchq.analysis.detections import Detections
from torchq.analysis.outputs import Outputs, compare_outputs, user_metric
from torchq.analysis.sensitivity import SensitivityReport, sensitivity
from torchq.errors import ConfigError, QuantizationError
from torchq.graph import Forward, call_model
from torchq.nn import QuantModule
from torchq.swap import plan_of
from torchq.utils import device_of, kept_batches, progress_bar, uncompiled, unwrapped, wrap
from torchq.workflow import quantizers, weight_quantizers
from torchq.workflow.correction import uncorrected

_WHERE = "doctor"
_SHOWN = 12  # places of one kind in a printed report


@dataclass(frozen=True)
class DoctorReport:
    """All findings, the gravest first; ``print`` it.

    Attributes:
        findings: what was found.
        checks: the kinds that were looked for.
        skipped: kinds that need batches, where none were given.
        outputs: what quantization does to the outputs; None without batches or with errors.
        cures: what helps where that is damage, the cheapest first.
    """

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    outputs: Outputs | None = None
    cures: tuple[Cure, ...] = ()

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return self.of("error")

    @property
    def ok(self) -> bool:
        """True without a finding of severity error."""
        return not self.errors

    @property
    def headline(self) -> str:
        """The counts, in one sentence."""
        counts = Counter(finding.severity for finding in self.findings)
        found = [
            f"{counts[s]} {s}{'s' if counts[s] != 1 and s != 'info' else ''}"
            for s in SEVERITIES
            if counts[s]
        ]
        text = f"{', '.join(found) or 'nothing found'} in {len(self.checks)} checks"
        return text + (f"; {len(self.skipped)} more checks need batches" if self.skipped else "")

    def __str__(self) -> str:
        lines = []
        groups: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.severity, finding.kind, finding.remedy), []).append(finding)
        for (severity, kind, remedy), alike in groups.items():
            lines.append(f"{severity.upper()} {kind}")
            for f in alike[:_SHOWN]:
                lines.append(wrap(f"  {f.name or '(root)'}: {f.evidence}", indent="    "))
            if len(alike) > _SHOWN:
                lines.append(f"  and {len(alike) - _SHOWN} more")
            lines.append(wrap(f"  -> {remedy}", indent="     "))
        return "\n".join([*lines, self.headline])


@uncompiled()
def doctor(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    metric: Any = None,
    forward: Forward | None = None,
    num_batches: int | None = 4,
    strict: bool = False,
    progress: bool = True,
) -> DoctorReport:
    """Look for the mistakes that are usual with quantized models.

    Args:
        model: quantized; left unchanged.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            Without them the checks that need a run are left out. They are kept in memory.
        metric: what says how far outputs are damaged: ``metric(output, batch)``, ``metric(model)``,
            larger for a better model; ``"detections"`` or a :class:`torchq.analysis.Detections`.
            None compares predictions.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        strict: raise an error if there is a finding of severity error.
        progress: show a bar.

    Returns:
        The findings, each with the call that mends it; ``print`` it.

    Raises:
        ConfigError: The model has no quantizer, or the metric is none of these.
        CalibrationError: ``batches`` holds none, or nothing that the float model detects.
        QuantizationError: With ``strict``, there is a finding of severity error.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> swapped = torchq.quantize_(model)
        >>> [finding.kind for finding in torchq.doctor(model).errors]
        ['uncalibrated', 'uncalibrated']
    """
    model = unwrapped(model)
    user_metric(_WHERE, metric)
    kept = None if batches is None else kept_batches(_WHERE, batches, num_batches)
    options: dict[str, Any] = {"forward": forward, "progress": progress}
    report = examine(
        model,
        kept,
        lambda: compare_outputs(model, kept or (), metric, **options),
        lambda: ranking_of(model, kept or (), metric, **options),
        **options,
    )
    if strict and not report.ok:
        found = f"got {len(report.errors)} errors; expected none"
        raise QuantizationError(f"{_WHERE}: {found}\n{report}")
    return report


def examine(
    model: nn.Module,
    batches: Sequence[Any] | None,
    outputs: Callable[[], Outputs],
    ranking: Callable[[], SensitivityReport],
    *,
    forward: Forward | None,
    progress: bool,
) -> DoctorReport:
    """Return the report of :func:`doctor`; ``outputs`` and ``ranking`` are called if needed."""
    known = quantizers(model)
    if not known:
        text = f"{_WHERE}: {type(model).__name__} has no quantizer; expected a quantized model. "
        text += "Run torchq.quantize_(model) first"
        raise ConfigError(text)
    seen = None
    if batches is not None:
        run = partial(call_model, model, forward=forward, device=device_of(model))
        shown = progress_bar(batches, description=_WHERE, enabled=progress)
        seen = observe(model, known, shown, run)
    patient = Patient(model, known, weight_quantizers(model), seen)
    chosen = [kind for kind in CHECKS if seen is not None or not CHECKS[kind].needs_batches]
    findings = [Finding(kind, *found) for kind in chosen for found in CHECKS[kind].find(patient)]
    # An error is mended first: what it does to the outputs says nothing of the rest.
    if seen is not None and all(finding.severity != "error" for finding in findings):
        found = outputs()
        patient = replace(patient, outputs=found)
        if found.grade != "good" and (found.comparable or found.score is not None):
            figures = _figures(patient, damage_shares(ranking()))
            patient = replace(patient, cures=tuple(cures(plan_of(model), figures)))
        findings += [Finding("damage", *found) for found in damage(patient)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    skipped = tuple(kind for kind in CHECKS if kind not in chosen)
    return DoctorReport(tuple(findings), tuple(chosen), skipped, patient.outputs, patient.cures)


def ranking_of(
    model: nn.Module, batches: Sequence[Any], metric: Any, **options: Any
) -> SensitivityReport:
    """Rank layers by detections if these are the metric, by the estimate for classes, or noise."""
    if metric == Detections.name or isinstance(metric, Detections):
        return sensitivity(model, batches, metric, **options)
    try:
        return sensitivity(model, batches, "fisher", **options)
    except (ConfigError, RuntimeError):  # no classes, or a forward without gradients
        return sensitivity(model, batches, "sqnr", **options)


def _figures(patient: Patient, shares: dict[str, float]) -> Figures:
    """Return what was measured of a model and its quantizers."""
    assert patient.seen is not None
    active, ends = patient.active, patient.seen.ends
    signed = [
        path.rpartition(".")[0]
        for path, q in active.items()
        if q.descriptor.format.is_integer
        and not (q.descriptor.unsigned or id(q) in patient.weights or q.descriptor.learn_amax)
        and q.descriptor.symmetric
        and ends.get(id(q), (-1.0, 0.0))[0] >= 0
    ]
    learned = any(q.descriptor.learn_amax for q in active.values())
    return Figures(
        shares,
        off=exceeded(patient),
        uncorrected=() if learned else uncorrected(patient.model),
        one_signed=signed,
        rounded=_rounded(patient.model),
        unequal=[path.rpartition(".")[0] for _, path, _, _ in range_spread(patient)],
    )


@torch.no_grad()
def _rounded(model: nn.Module) -> list[str]:
    """Return the layers whose weights are values of their grids."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, QuantModule)
        and any(q.quantizing and torch.equal(q(w), w) for q, w in module.quantized_weights())
    ]
