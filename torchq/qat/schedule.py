"""Schedules: what quantizers do at a training step, as functions that a training loop calls.

Each ``..._from_`` and ``..._at_`` function takes the number of the step and brings the model into
the state that belongs to it. The state follows from the number alone, so a run that is resumed in
the middle continues as it would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer
from torchq.qat.batchnorm import freeze_bn_, unfreeze_bn_
from torchq.utils import Pattern, short_repr
from torchq.workflow import calibrate_weights, select_quantizers, weight_quantizers

__all__ = [
    "bits_at_",
    "change_bits_",
    "freeze_bn_from_",
    "freeze_ranges_from_",
    "observing",
    "quantize_from_",
]

Patterns = Sequence[Pattern] | Pattern


def quantize_from_(
    model: nn.Module, step: int, start: int, patterns: Patterns = "*"
) -> tuple[str, ...]:
    """Let the selected quantizers pass values through before step ``start``, and quantize then.

    Args:
        model: a quantized model; changed in place.
        step: the number of the step that comes now.
        start: the first step that is quantized.
        patterns: as for :func:`torchq.disabled`.

    Returns:
        The paths of the selected quantizers whose mode changed.

    Raises:
        ConfigError: a pattern selects no quantizer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> [quantize_from_(model, step, 2, "*.input_quantizer") for step in range(3)]
        [('0.input_quantizer',), (), ('0.input_quantizer',)]
    """
    changed = []
    for name, quantizer in select_quantizers(model, patterns).items():
        if quantizer.quantizing != (step >= start):
            quantizer.quantizing = step >= start
            changed.append(name)
    return tuple(changed)


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


def bits_at_(
    model: nn.Module, step: int, schedule: Mapping[int, int], patterns: Patterns = "*"
) -> tuple[str, ...]:
    """Give the selected quantizers the width that ``schedule`` has for ``step``.

    Call it in each step. In the first step of a width, known ranges of weights are calibrated
    again, as by :func:`change_bits_`; in a later one, where a run is resumed, ranges stay.

    Args:
        model: a calibrated model; changed in place.
        step: the number of the step that comes now.
        schedule: first step -> width from there on, such as ``{0: 8, 500: 6, 1000: 4}``.
        patterns: as for :func:`torchq.disabled`.

    Returns:
        The paths of the quantizers whose width changed.

    Raises:
        ConfigError: the schedule has no width for step 0, or see :func:`change_bits_`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> for step in range(4):
        ...     _ = bits_at_(model, step, {0: 8, 2: 4}, "*.weight_quantizer")
        >>> model[0].weight_quantizer.descriptor.num_bits
        4
    """
    if not schedule or min(schedule) > 0:
        raise ConfigError(
            f"bits_at_: got the schedule {short_repr(dict(schedule))}; "
            "expected widths from step 0 on"
        )
    reached = max(first for first in schedule if first <= max(step, 0))
    # Later the ranges are those of a run that is resumed, which has learned them since.
    return _change(model, schedule[reached], patterns, calibrating=step <= reached)


def change_bits_(model: nn.Module, bits: int, patterns: Patterns = "*") -> tuple[str, ...]:
    """Change the width of the selected integer quantizers, in place.

    Known ranges of weights are calibrated again, from the weights. Ranges of activations stay:
    let them be learned, or calibrate them again with ``torchq.calibrate(..., force=True)``.

    Args:
        model: a quantized model.
        bits: the new width, 2 to 16.
        patterns: as for :func:`torchq.disabled`.

    Returns:
        The paths of the quantizers whose width changed.

    Raises:
        ConfigError: an invalid width, a float format, or a pattern that selects no quantizer.
    """
    return _change(model, bits, patterns, calibrating=True)


def _change(model: nn.Module, bits: int, patterns: Patterns, calibrating: bool) -> tuple[str, ...]:
    """Change widths, and calibrate known ranges of weights again if ``calibrating``."""
    chosen = select_quantizers(model, patterns)
    new = {name: _with_bits(name, quantizer, bits) for name, quantizer in chosen.items()}
    changed = {n: q for n, q in chosen.items() if q.descriptor.num_bits != bits}
    for name, quantizer in changed.items():
        quantizer.descriptor = new[name]
    weights = {id(q) for q in changed.values() if q.calibrated} & weight_quantizers(model)
    if weights and calibrating:
        calibrate_weights(model, only=weights)
    return tuple(changed)


def _with_bits(name: str, quantizer: TensorQuantizer, bits: int) -> QuantDescriptor:
    """Return the descriptor of ``quantizer`` with another width."""
    if not isinstance(quantizer.descriptor.num_bits, int):
        raise ConfigError(
            f"{name}: got change_bits_ for {quantizer.descriptor}; expected an integer format. "
            "Leave it out of the patterns"
        )
    return quantizer.descriptor.replace(num_bits=bits)


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
