"""Checks of ranges: unknown, useless, too wide, too narrow, stale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchq.analysis.diagnosis.finding import Finding
from torchq.analysis.diagnosis.registry import Patient, check
from torchq.functional import is_dead
from torchq.nn import TensorQuantizer

__all__ = ["EXCEEDED", "SKEWED"]

#: Largest over 99.9th percentile from which on outliers cost an 8-bit range most of its codes.
SKEWED = 20.0
#: 99.9th percentile over range from which on the range is that of other data.
EXCEEDED = 2.0

_CALIBRATE = "torchq.calibrate(model, batches, force=True)"


def _fixed(patient: Patient) -> Iterator[tuple[str, TensorQuantizer, Tensor]]:
    """Yield quantizers that are on and have a range, with it."""
    for path, quantizer in patient.active.items():
        if quantizer.calibrated and not quantizer.descriptor.dynamic and not quantizer.amax.is_meta:
            yield path, quantizer, quantizer.amax.detach()


@check("unseen", needs_batches=True)
def unseen(patient: Patient) -> Iterator[Finding]:
    """Yield quantizers of inputs that no batch reached."""
    assert patient.seen is not None
    for path, quantizer in patient.active.items():
        if id(quantizer) in patient.weights or id(quantizer) in patient.seen.quantizers:
            continue
        owner = path.rpartition(".")[0]
        known = quantizer.calibrated and not quantizer.descriptor.dynamic
        yield Finding(
            "unseen",
            "warning" if known or quantizer.descriptor.dynamic else "error",
            path,
            f"none of {patient.seen.batches} batches reached it",
            f"torchq.quantize_(model, config, exclude=[{owner!r}]), or batches that reach it",
        )


@check("uncalibrated")
def uncalibrated(patient: Patient) -> Iterator[Finding]:
    """Yield quantizers without a range, which take that of each call for the time."""
    for path, quantizer in patient.active.items():
        if not quantizer.calibrated and not quantizer.descriptor.dynamic:
            text = "has no range yet, and takes that of each call"
            yield Finding("uncalibrated", "error", path, text, "torchq.calibrate(model, batches)")


@check("dynamic_range")
def dynamic_range(patient: Patient) -> Iterator[Finding]:
    """Yield quantizers that take the range of each call, as their descriptor says."""
    for path, quantizer in patient.active.items():
        if quantizer.descriptor.dynamic:
            text = "takes the range of each call, as its descriptor says; no file can hold that"
            remedy = "a recipe without dynamic ranges, to export"
            yield Finding("dynamic_range", "info", path, text, remedy)


@check("zero_range")
def zero_range(patient: Patient) -> Iterator[Finding]:
    """Yield ranges of 0, which turn everything into 0."""
    for path, quantizer, amax in _fixed(patient):
        dead = is_dead(amax, quantizer.descriptor.format) & (amax >= 0)
        count, total = int(dead.sum()), amax.numel()
        if not count or quantizer.descriptor.learn_amax:
            continue
        if id(quantizer) in patient.weights:
            text = f"{count} of {total} channels of the weight are 0"
            yield Finding(
                "zero_range", "info", path, text, "nothing, if the channels are meant to be 0"
            )
        else:
            text = f"{count} of {total} ranges are 0, so everything becomes 0"
            yield Finding(
                "zero_range", "error", path, text, f"{_CALIBRATE} with data that is not 0"
            )


@check("nan_range")
def nan_range(patient: Patient) -> Iterator[Finding]:
    """Yield ranges that are no finite numbers, and the place where NaN first arises."""
    for path, _, amax in _fixed(patient):
        bad = int((~torch.isfinite(amax)).sum())
        if bad:
            text = f"{bad} of {amax.numel()} ranges are NaN or infinite"
            yield Finding("nan_range", "error", path, text, _CALIBRATE)
    if patient.seen is None:
        return
    for path, quantizer in patient.active.items():
        seen = patient.seen.quantizers.get(id(quantizer))
        if seen is not None and not seen.finite:
            text = "was given NaN or infinity by the float model; the layers behind follow"
            yield Finding("nan_range", "error", path, text, "check the data and the float model")
            return


@check("learned_range")
def learned_range(patient: Patient) -> Iterator[Finding]:
    """Yield learned ranges that training drove to 0 or below."""
    for path, quantizer, amax in _fixed(patient):
        if not quantizer.descriptor.learn_amax:
            continue
        bad = is_dead(amax, quantizer.descriptor.format) | (amax < 0)
        if bool(bad.any()):
            text = f"{int(bad.sum())} of {amax.numel()} learned ranges are 0 or negative"
            text += f" (smallest {float(amax.min()):.3g})"
            yield Finding(
                "learned_range",
                "error",
                path,
                text,
                "torchq.calibrate(model, batches, force=True), then train with a smaller learning "
                "rate: torchq.qat.param_groups(model, lr=...)",
            )


@check("skewed_range", needs_batches=True)
def skewed_range(patient: Patient) -> Iterator[Finding]:
    """Yield ranges that a few outliers stretch."""
    assert patient.seen is not None
    for path, quantizer, amax in _fixed(patient):
        seen = patient.seen.quantizers.get(id(quantizer))
        if seen is None or id(quantizer) in patient.weights or not seen.usual or not seen.finite:
            continue
        ratio = float(amax.max()) / seen.usual
        if ratio > SKEWED:
            text = f"its range is {ratio:.0f} times the 99.9th percentile ({seen.usual:.3g})"
            remedy = 'torchq.calibrate(model, batches, method="entropy", force=True)'
            yield Finding("skewed_range", "warning", path, text, remedy)


@check("narrow_range", needs_batches=True)
def narrow_range(patient: Patient) -> Iterator[Finding]:
    """Yield ranges of inputs that usual values exceed by far."""
    assert patient.seen is not None
    for path, quantizer, amax in _fixed(patient):
        seen = patient.seen.quantizers.get(id(quantizer))
        if seen is None or id(quantizer) in patient.weights or amax.numel() != 1:
            continue
        if float(amax) > 0 and seen.usual > EXCEEDED * float(amax):
            text = f"its range is {float(amax):.3g}, but usual values reach {seen.usual:.3g}"
            yield Finding("narrow_range", "error", path, text, _CALIBRATE)
