"""Ranges that are learned: their gradient, and where they start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.functional import (
    amax_from_scale,
    compute_dtype,
    scale_and_zero_point,
    scale_from_amax,
    straight_through,
)
from torchq.functional.fake_quant import living_ends
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import Pattern
from torchq.workflow import select_quantizers

__all__ = ["learn_ranges_"]

#: Method -> changes of the descriptor. Each also learns, with LSQ's gradient scale.
_METHODS: dict[str, dict[str, Any]] = {
    "lsq": {},
    "lsq+": {"symmetric": False},
    "pact": {},
}


def learn_ranges_(
    model: nn.Module,
    method: str = "lsq",
    patterns: Sequence[Pattern] | Pattern = "*",
    *,
    start: Literal["calibrated", "lsq"] = "calibrated",
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
        start: ``"calibrated"`` starts from the known ranges; ``"lsq"`` starts symmetric ranges of
            weights from ``scale = 2 * mean(|w|) / sqrt(qmax)`` (Esser et al., section 2.1).

    Returns:
        The paths of the quantizers whose ranges learn now.

    Raises:
        ConfigError: an unknown method or start, a range that is not known or taken from each
            call, a format that the method cannot do, or a pattern that selects no quantizer. The
            model is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model), torchq.calibrate(model, [torch.ones(1, 2)], progress=False)
        >>> learn_ranges_(model, "lsq+", "*.input_quantizer")
        ('0.input_quantizer',)
    """
    if method not in _METHODS or start not in ("calibrated", "lsq"):
        raise ConfigError(
            f"learn_ranges_: got method {method!r} and start {start!r}; expected one of "
            f"{', '.join(_METHODS)}, and 'calibrated' or 'lsq'"
        )
    chosen = select_quantizers(model, patterns)
    descriptors = {path: _learned(path, q, method) for path, q in chosen.items()}
    weights = _weights(model)
    for path, quantizer in chosen.items():
        first = weights.get(id(quantizer)) if start == "lsq" else None
        _make_parameters(quantizer, descriptors[path], first)
        if method == "pact":
            quantizer.delegate = _clipped_gradient
    return tuple(chosen)


def _clipped_gradient(x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Return ``x`` quantized; in training its range feels only the values that it clips."""
    y = quantizer.apply_own(x)
    if not quantizer.training or torch.onnx.is_in_onnx_export():
        return y
    d = quantizer.descriptor
    amin, amax = quantizer.ends_for(x)
    parts, dtype = d.granularity.split(x), compute_dtype(x.dtype)
    top = d.granularity.align(amax.to(dtype), x.shape)
    if amin is None:
        scale = scale_from_amax(top, d.format, d.block_scale_format)
        point = torch.zeros_like(scale)
    else:
        bottom, top = living_ends(d.granularity.align(amin.to(dtype), x.shape), top)
        scale, point = scale_and_zero_point(bottom, top, d.format, d.block_scale_format)
    low, high = (scale * (end - point) for end in (d.format.quant_min, d.format.quant_max))
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
    try:
        return quantizer.descriptor.replace(
            learn_amax=True, scale_range_grad=True, **_METHODS[method]
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _weights(model: nn.Module) -> dict[int, Tensor]:
    """Return the weight of each weight quantizer, by the quantizer's id."""
    return {
        id(quantizer): weight.detach()
        for module in model.modules()
        if isinstance(module, QuantModule)
        for quantizer, weight in module.quantized_weights()
    }


def _make_parameters(
    quantizer: TensorQuantizer, descriptor: QuantDescriptor, weight: Tensor | None
) -> None:
    amax = quantizer.amax.detach().clone()
    if weight is not None and descriptor.symmetric:
        amax = _lsq_start(weight, descriptor).to(amax).view_as(amax)
    ends = {"amax": amax}
    if not descriptor.symmetric:
        known = quantizer.amin
        if known is None:  # The range was symmetric; unsigned codes start at 0.
            low = quantizer.descriptor.format.quant_min / quantizer.descriptor.format.quant_max
            known = amax * low
        ends["amin"] = known.detach().clone()
    quantizer.descriptor = descriptor
    for name, value in ends.items():
        delattr(quantizer, name)
        quantizer.register_parameter(name, nn.Parameter(value))


def _lsq_start(weight: Tensor, descriptor: QuantDescriptor) -> Tensor:
    """Return the amax that LSQ starts from."""
    granularity = descriptor.granularity
    parts = granularity.split(weight.float()).abs()
    dims = granularity.reduce_dims(parts.dim())
    mean = parts.mean(dims, keepdim=True) if dims else parts
    scale = 2 * mean / math.sqrt(descriptor.format.qmax)
    return amax_from_scale(scale, descriptor.format).reshape(granularity.amax_shape(weight.shape))
