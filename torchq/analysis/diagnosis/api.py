"""The examination of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from torch import nn

from torchq.analysis.batches import checked_batches
from torchq.analysis.diagnosis import (
    order_checks,
    range_checks,
    structure_checks,
    target_checks,
)
from torchq.analysis.diagnosis.finding import SEVERITIES, DoctorReport
from torchq.analysis.diagnosis.observation import observe
from torchq.analysis.diagnosis.registry import CHECKS, Patient
from torchq.errors import CalibrationError, ConfigError, QuantizationError
from torchq.graph import Forward, call_model
from torchq.swap import targets as known_targets
from torchq.utils import device_of, progress_bar, uncompiled, unwrapped
from torchq.workflow import quantizers, weight_quantizers

__all__ = ["doctor"]

_WHERE = "doctor"
# Importing these files enters their checks.
_CHECK_FILES = (range_checks, order_checks, structure_checks, target_checks)


@uncompiled()
def doctor(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    targets: Sequence[str] = (),
    forward: Forward | None = None,
    num_batches: int | None = 4,
    strict: bool = False,
    progress: bool = True,
) -> DoctorReport:
    """Look for everything that is known to go wrong with a quantized model.

    Args:
        model: quantized; left unchanged.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            Without them the checks that need a run are left out.
        targets: runtimes to look for obstacles of: names in :func:`torchq.targets`, for which the
            model is exported, and ``"deploy"``, for which it is deployed.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        strict: raise an error if there is a finding of severity error.
        progress: show a bar.

    Returns:
        The findings, each with the call that mends it; ``print`` it.

    Raises:
        ConfigError: The model has no quantizer, or a target is unknown.
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
    _check_targets(targets, batches)
    seen = None
    if batches is not None:
        stream = checked_batches(_WHERE, batches, num_batches)
        device = device_of(model)
        shown = progress_bar(
            islice(stream, num_batches), description=_WHERE, total=stream.total, enabled=progress
        )
        seen = observe(
            model, known, shown, lambda b: call_model(model, b, forward=forward, device=device)
        )
        if seen is None:
            raise CalibrationError(
                f"{_WHERE}: got no batch; expected at least one, or batches=None"
            )
    patient = Patient(model, known, weight_quantizers(model), seen, tuple(targets))
    report = _examine(patient)
    if strict and not report.ok:
        raise QuantizationError(
            f"{_WHERE}: got {len(report.errors)} errors; expected none\n{report}"
        )
    return report


def _check_targets(targets: Sequence[str], batches: Iterable[Any] | None) -> None:
    expected = (*known_targets(), target_checks.DEPLOY)
    for target in targets:
        if target not in expected:
            raise ConfigError(
                f"{_WHERE}: got target {target!r}; expected one of {', '.join(expected)}"
            )
    if targets and batches is None:
        raise ConfigError(f"{_WHERE}: got targets without batches; expected an example to export")


def _examine(patient: Patient) -> DoctorReport:
    chosen = [kind for kind in CHECKS if patient.seen is not None or not CHECKS[kind].needs_batches]
    findings = [finding for kind in chosen for finding in CHECKS[kind].find(patient)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    skipped = tuple(kind for kind in CHECKS if kind not in chosen)
    return DoctorReport(tuple(findings), tuple(chosen), skipped)
