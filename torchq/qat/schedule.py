"""Schedules: what quantizers do at a training step, as functions that a training loop calls.

Each ``..._from_`` function takes the number of the step and brings the model into
the state that belongs to it. The state follows from the number alone, so a run that is resumed in
the middle continues as it would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchq.qat.batchnorm import freeze_bn_, unfreeze_bn_
from torchq.utils import Pattern
from torchq.workflow import select_quantizers

__all__ = [
    "freeze_bn_from_",
    "freeze_ranges_from_",
    "observing",
]

Patterns = Sequence[Pattern] | Pattern


def freeze_ranges_from_(
    model: nn.Module, step: int, start: int, patterns: Patterns = "*"
) -> tuple[str, ...]:
    """Let the selected ranges learn before step ``start``, and stay fixed from then on.

    Under DistributedDataParallel call it before the model is wrapped, or wrap the model again when
    it returns paths: DistributedDataParallel waits for the gradient of every parameter that had
    one when it was constructed.

    Args:
        model: a quantized model; changed in place.
        step: the number of the step that comes now.
        start: the first step with fixed ranges.
        patterns: as for :func:`torchq.disabled`.

    Returns:
        The paths of the selected quantizers whose ranges were fixed or freed.

    Raises:
        ConfigError: a pattern selects no quantizer.
    """
    changed = []
    for name, quantizer in select_quantizers(model, patterns).items():
        ranges = list(quantizer.parameters(recurse=False))
        if any(range_.requires_grad != (step < start) for range_ in ranges):
            quantizer.requires_grad_(step < start)
            changed.append(name)
    return tuple(changed)


def freeze_bn_from_(model: nn.Module, step: int, start: int) -> tuple[str, ...]:
    """Let the statistics of every BatchNorm move before step ``start``, and stay from then on.

    The BatchNorms stay frozen after ``model.train()``; see :func:`torchq.qat.freeze_bn_`.

    Args:
        model: any module; changed in place.
        step: the number of the step that comes now.
        start: the first step with fixed statistics.

    Returns:
        The paths of the layers that were frozen or freed.
    """
    return freeze_bn_(model) if step >= start else unfreeze_bn_(model)


@contextmanager
def observing(
    model: nn.Module,
    patterns: Patterns = "*.input_quantizer",
    *,
    method: str | None = None,
    **options: Any,
) -> Iterator[tuple[str, ...]]:
    """Let the selected quantizers follow the data while they quantize, inside a ``with`` block.

    At the end of the block each range becomes that of the data that it saw, and a quantizer that
    saw none keeps its own. After an exception every range is as before.

    Args:
        model: a calibrated model, trained inside the block or only run.
        patterns: as for :func:`torchq.disabled`.
        method: as for :func:`torchq.calibrate`.
        **options: as for :func:`torchq.calibrate`.

    Yields:
        The paths of the selected quantizers.

    Raises:
        ConfigError: a pattern selects no quantizer.
        CalibrationError: NaN or infinite values were seen.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> with observing(model):
        ...     for scale in (1.0, 3.0):
        ...         _ = model(scale * torch.ones(4, 2))
        >>> model[0].input_quantizer.amax.item()
        3.0
    """
    chosen = select_quantizers(model, patterns)
    before = [(q, q.observing, q.calibrator) for q in chosen.values()]
    try:
        for quantizer in chosen.values():
            quantizer.start_calibration(method, **options)
        yield tuple(chosen)
        for quantizer in chosen.values():
            if quantizer.calibrator is not None and quantizer.calibrator.seen:
                quantizer.finish_calibration()
    finally:
        for quantizer, was_observing, calibrator in before:
            quantizer.observing, quantizer.calibrator = was_observing, calibrator
