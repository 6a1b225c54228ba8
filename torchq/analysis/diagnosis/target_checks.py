"""Checks of what stands in the way of an export or of integer kernels."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from torchq.analysis.diagnosis.finding import Finding
from torchq.analysis.diagnosis.registry import Patient, check
from torchq.engines import TorchEngine, deploy
from torchq.errors import ExportError
from torchq.onnx import export_onnx
from torchq.workflow import summary

__all__ = ["DEPLOY"]

#: The name that stands for torchq's own integer kernels beside the names of runtimes.
DEPLOY = "deploy"


@check("export_obstacle", needs_batches=True)
def export_obstacle(patient: Patient) -> Iterator[Finding]:
    """Yield what each ONNX runtime that was asked for would refuse, by exporting for it."""
    assert patient.seen is not None
    for target in patient.targets:
        if target == DEPLOY:
            continue
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = Path(folder, "model.onnx")
            try:
                report = export_onnx(patient.model, patient.seen.example, path, target=target)
            except ExportError as error:
                yield _obstacle(target, "error", str(error))
                continue
        for text in report.warnings:
            yield _obstacle(target, "warning", text)


def _obstacle(target: str, severity: str, text: str) -> Finding:
    """Return a finding from a sentence of the form ``place: problem. fix``."""
    where, separator, problem = text.partition(": ")
    if not separator:
        where, problem = "", text
    problem, _, fix = problem.partition(". ")
    remedy = fix or f"torchq.quantize_(model, config, target={target!r}, example=example)"
    return Finding(
        "export_obstacle",
        "error" if severity == "error" else "warning",
        where,
        f"{target}: {problem}",
        remedy,
    )


@check("deploy_obstacle", needs_batches=True)
def deploy_obstacle(patient: Patient) -> Iterator[Finding]:
    """Yield layers for which :func:`torchq.deploy` has no integer kernel."""
    if DEPLOY not in patient.targets:
        return
    assert patient.seen is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Not measured: what is slower on integers depends on what else the machine does.
            engine = TorchEngine(measured=False)
            deployed = deploy(patient.model, patient.seen.example, engine=engine)
        except ExportError as error:
            where, _, problem = str(error).partition(": ")
            yield Finding("deploy_obstacle", "error", "", problem or where, "see the text")
            return
    for row in summary(deployed).layers:
        if row.kernel == "simulated":
            remedy = "another recipe for this layer, or exclude it"
            yield Finding("deploy_obstacle", "warning", row.name, f"simulates: {row.note}", remedy)
