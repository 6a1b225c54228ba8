"""What is wrong with a quantized model, and the call that mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.analysis.checks import CHECKS, SEVERITIES, Finding, Patient, Severity, observe
from torchq.errors import CalibrationError, ConfigError, QuantizationError
from torchq.graph import Forward, call_model
from torchq.utils import (
    check_batches,
    device_of,
    progress_bar,
    uncompiled,
    unwrapped,
    wrap,
)
from torchq.workflow import quantizers, weight_quantizers

_WHERE = "doctor"
_SHOWN = 12  # places of one kind in a printed report


@dataclass(frozen=True)
class DoctorReport:
    """All findings, the gravest first; ``print`` it.

    Attributes:
        findings: what was found.
        checks: the kinds that were looked for.
        skipped: kinds that need batches, where none were given.
    """

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    skipped: tuple[str, ...] = ()

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
        found = [_counted(counts[s], s) for s in SEVERITIES if counts[s]]
        text = ", ".join(found) if found else "nothing found"
        text += f" in {len(self.checks)} checks"
        if self.skipped:
            text += f"; {len(self.skipped)} more checks need batches"
        return text

    def __str__(self) -> str:
        lines = []
        kinds = dict.fromkeys((f.severity, f.kind, f.remedy) for f in self.findings)
        for severity, kind, remedy in kinds:
            alike = [
                f
                for f in self.findings
                if (f.severity, f.kind, f.remedy) == (severity, kind, remedy)
            ]
            lines.append(f"{severity.upper()} {kind}")
            lines += [
                wrap(f"  {f.name or '(root)'}: {f.evidence}", indent="    ") for f in alike[:_SHOWN]
            ]
            if len(alike) > _SHOWN:
                lines.append(f"  and {len(alike) - _SHOWN} more")
            lines.append(wrap(f"  -> {remedy}", indent="     "))
        return "\n".join([*lines, self.headline])


def _counted(number: int, severity: str) -> str:
    plural = "s" if number != 1 and severity != "info" else ""
    return f"{number} {severity}{plural}"


@uncompiled()
def doctor(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    forward: Forward | None = None,
    num_batches: int | None = 4,
    strict: bool = False,
    progress: bool = True,
) -> DoctorReport:
    """Look for the mistakes that are usual with quantized models.

    Args:
        model: quantized; left unchanged.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            Without them the checks that need a run are left out.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        strict: raise an error if there is a finding of severity error.
        progress: show a bar.

    Returns:
        The findings, each with the call that mends it; ``print`` it.

    Raises:
        ConfigError: The model has no quantizer.
        CalibrationError: ``batches`` holds none.
        QuantizationError: With ``strict``, there is a finding of severity error.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> swapped = torchq.quantize_(model)
        >>> [finding.kind for finding in torchq.doctor(model).errors]
        ['uncalibrated', 'uncalibrated']
    """
    model = unwrapped(model)
    known = quantizers(model)
    if not known:
        raise ConfigError(
            f"{_WHERE}: {type(model).__name__} has no quantizer; expected a quantized model. "
            "Run torchq.quantize_(model) first"
        )
    seen = None
    if batches is not None:
        check_batches(_WHERE, batches, num_batches)
        device = device_of(model)
        shown = progress_bar(batches, description=_WHERE, most=num_batches, enabled=progress)
        seen = observe(
            model, known, shown, lambda b: call_model(model, b, forward=forward, device=device)
        )
        if seen is None:
            raise CalibrationError(
                f"{_WHERE}: got no batch; expected at least one, or batches=None"
            )
    patient = Patient(model, known, weight_quantizers(model), seen)
    chosen = [kind for kind in CHECKS if seen is not None or not CHECKS[kind].needs_batches]
    findings = [Finding(kind, *found) for kind in chosen for found in CHECKS[kind].find(patient)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    skipped = tuple(kind for kind in CHECKS if kind not in chosen)
    report = DoctorReport(tuple(findings), tuple(chosen), skipped)
    if strict and not report.ok:
        raise QuantizationError(
            f"{_WHERE}: got {len(report.errors)} errors; expected none\n{report}"
        )
    return report
