"""Ranges in training: learned, shared, fixed from a step on, or following the data."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.functional import compute_dtype, scale_from_amax, straight_through
from torchq.functional.fake_quant import living_ends
from torchq.functional.scale import scale_and_zero_point
from torchq.nn import TensorQuantizer, share_quantizers_
from torchq.utils import Pattern
from torchq.workflow import select_quantizers, weight_quantizers

_METHODS = ("lsq", "lsq+", "pact")


def learn_ranges_(
    model: nn.Module,
    method: str = "lsq",
    patterns: Sequence[Pattern] | Pattern = "*",
) -> tuple[str, ...]:
    """Make the ranges of the selected quantizers parameters that training learns, in place.

    ====== =========================================================================
    method what is learned
    ====== =========================================================================
    lsq    amax, from rounding and clipping (Esser et al., ICLR 2020)
    lsq+   both ends of the range (Bhalgat et al., CVPR Workshops 2020)
    pact   amax, from the clipped values alone (Choi et al. 2018, section 3)
    ====== =========================================================================

    All gradients have the scale of LSQ, so that plain SGD can train them. Make the optimizer
    afterwards, with :func:`torchq.qat.param_groups`.

    Args:
        model: a calibrated model.
        method: see the table.
        patterns: as for :func:`torchq.disabled`.

    Returns:
        The paths of the quantizers whose ranges learn now.

    Raises:
        ConfigError: an unknown method, a range that is not known or taken from each
            call, a format that the method cannot do, or a pattern that selects no quantizer. The
            model is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model), torchq.calibrate(model, [torch.ones(1, 2)], progress=False)
        >>> learn_ranges_(model, "lsq+", "*.input_quantizer")
        ('0.input_quantizer',)
    """
    if method not in _METHODS:
        raise ConfigError(
            f"learn_ranges_: got method {method!r}; expected one of {', '.join(_METHODS)}"
        )
    chosen = select_quantizers(model, patterns)
    descriptors = {path: _learned(path, q, method) for path, q in chosen.items()}
    for path, quantizer in chosen.items():
        _make_parameters(quantizer, descriptors[path])
        if method == "pact":
            quantizer.delegate = _clipped_gradient
    return tuple(chosen)


def _clipped_gradient(x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Return ``x`` quantized; in training its range feels only the values that it clips."""
    y = quantizer.apply_own(x)
    if not quantizer.training or torch.onnx.is_in_onnx_export():
        return y
    d = quantizer.descriptor
    amax, amin = quantizer.range_for(x)
    parts = d.granularity.split(x)
    dtype = compute_dtype(x.dtype)
    top = d.granularity.align(amax.to(dtype), x.shape)
    if amin is None:
        scale = scale_from_amax(top, d.format, d.block_scale_format)
        point = torch.zeros_like(scale)
    else:
        bottom, top = living_ends(d.granularity.align(amin.to(dtype), x.shape), top)
        scale, point = scale_and_zero_point(bottom, top, d.format, d.block_scale_format)
    low, high = (
        scale * (end - point) for end in (d.format.quant_min, d.format.quant_max)
    )
    clipped = torch.minimum(torch.maximum(parts.to(dtype), low), high)
    return straight_through(d.granularity.join(clipped.to(x.dtype), x.shape), y)


def _learned(path: str, quantizer: TensorQuantizer, method: str) -> QuantDescriptor:
    """Return the descriptor with which a quantizer learns its range."""
    if not quantizer.calibrated or quantizer.descriptor.dynamic:
        raise ConfigError(
            f"{path}: got learn_ranges_ for a range that is not known; expected a calibrated one. "
            "Run torchq.calibrate first"
        )
    if method == "pact" and quantizer.delegate is not None:
        raise ConfigError(
            f"{path}: got method 'pact' for a quantizer with a delegate; expected one without"
        )
    changes: dict[str, object] = {"symmetric": False} if method == "lsq+" else {}
    try:
        return quantizer.descriptor.replace(
            learn_amax=True, scale_range_grad=True, **changes
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _make_parameters(quantizer: TensorQuantizer, descriptor: QuantDescriptor) -> None:
    amax = quantizer.amax.detach().clone()
    ends = {"amax": amax}
    if not descriptor.symmetric:
        low_end = quantizer.amin
        if low_end is None:  # The range was symmetric; unsigned codes start at 0.
            low = (
                quantizer.descriptor.format.quant_min
                / quantizer.descriptor.format.quant_max
            )
            low_end = amax * low
        ends["amin"] = low_end.detach().clone()
    quantizer.drop_qparams()
    quantizer.descriptor = descriptor
    for name, value in ends.items():
        delattr(quantizer, name)
        quantizer.register_parameter(name, nn.Parameter(value))


def share_range_(
    model: nn.Module, patterns: Sequence[Pattern] | Pattern
) -> TensorQuantizer:
    """Let all activation quantizers that a pattern selects be one quantizer, in place.

    They are calibrated together, learned together and exported with one scale. A runtime needs
    that where it moves codes without requantizing them: at the inputs of a concatenation, or at
    the readers of one tensor. The sharing survives ``deepcopy``, pickle, :func:`torchq.save` and
    state dicts, which hold the range under every path.

    Args:
        model: a quantized model; changed in place.
        patterns: as for :func:`torchq.disabled`. Of modules with weights only the input
            quantizers count.

    Returns:
        The quantizer that all of them now are. If ranges were known, it has the largest.

    Raises:
        ConfigError: The patterns select fewer than two quantizers, or their descriptors differ or
            are not per tensor.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> shared = torchq.qat.share_range_(model, "*.input_quantizer")
        >>> model[0].input_quantizer is model[1].input_quantizer
        True
    """
    weights = weight_quantizers(model)
    selected = select_quantizers(model, patterns)
    chosen = [
        path for path, quantizer in selected.items() if id(quantizer) not in weights
    ]
    if len(chosen) < 2:
        raise ConfigError(
            f"share_range_: {patterns!r} selects {chosen or 'no quantizer of activations'}; "
            "expected at least two"
        )
    return share_quantizers_(model, chosen)


def freeze_ranges_from_(
    model: nn.Module, step: int, start: int, patterns: Sequence[Pattern] | Pattern = "*"
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


@contextmanager
def observing(
    model: nn.Module,
    patterns: Sequence[Pattern] | Pattern = "*.input_quantizer",
    *,
    method: str | None = None,
    **options: object,
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
