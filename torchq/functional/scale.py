"""The arithmetic between ranges and scales, and the rule for dead ranges, in one place.

``scale = amax / format.qmax`` is what ONNX and PyTorch call *scale*. It is computed in float32, or
in float64 for float64 data. A range is *dead* where this scale is below the smallest normal number
of the dtype (about 1.2e-38 in float32), so in particular where amax is 0. A dead range quantizes
everything to exactly 0, and its scale is 1, so that every scale is a positive number. An infinite
or NaN amax gives NaN: a poisoned range must be seen, not hidden.

An asymmetric range ``[amin, amax]`` always contains 0, which one code, the zero point, represents
exactly: ``scale = (amax - amin) / (quant_max - quant_min)`` and ``zero_point = round(quant_min -
amin / scale)``, ties to even. This is affine quantization as ONNX and PyTorch define it; see Jacob
et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference
(CVPR 2018), section 3.
"""

import math

import torch
from torch import Tensor

from torchq.formats import (
    POWER_OF_TWO,
    FloatFormat,
    Format,
    PowersOfTwo,
    ScaleType,
    power_of_two_below,
)
from torchq.functional.gradient import straight_through


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that quantization computes in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def is_dead(amax: Tensor, format: Format) -> Tensor:
    """Return where a symmetric range quantizes everything to 0; False for infinity and NaN."""
    return _over(amax, format.qmax) < torch.finfo(amax.dtype).tiny


def scale_from_amax(
    amax: Tensor, format: Format, scale_format: Format | None = None
) -> Tensor:
    """Return the scale for each amax.

    Args:
        amax: float32 or float64, any shape, >= 0. With a format of block scales, all blocks of one
            tensor.
        format: The number format; amax is mapped to its ``qmax``.
        scale_format: Round the scales to this format. :data:`torchq.formats.POWER_OF_TWO` rounds
            up to a power of two, and a :class:`torchq.formats.ScaleType` to the nearest number of
            its type. A format without mantissa bits (E8M0) gives
            ``2**(floor(log2(amax)) - floor(log2(qmax)))`` (OCP Microscaling Formats 1.0, section
            6.3). Any other format gets a second scale for the whole tensor, which brings the
            largest block scale to the format's maximum (NVFP4).

    Returns:
        The dtype and shape of ``amax``. 1 for a dead range; 0 for a block so far below the largest
        one that its scale rounds to 0; else a normal number.

    Example:
        >>> from torchq.formats import INT8
        >>> scale_from_amax(torch.tensor([127.0, 0.0]), INT8)
        tensor([1., 1.])
    """
    smallest_normal = torch.finfo(amax.dtype).tiny
    if scale_format is None:
        scale = _over(amax, format.qmax)
        is_tiny = scale < smallest_normal
    else:
        scale = _rounded_scale(amax, format, scale_format)
        # Rounding may give 0 to a block far below the largest one: that stays.
        is_subnormal = (scale < smallest_normal) & (scale > 0)
        is_tiny = is_dead(amax, format) | is_subnormal
    return torch.where(is_tiny, 1.0, scale)


def _over(x: Tensor, number: float) -> Tensor:
    """Return ``x / number`` with one rounding, where torch on CUDA multiplies by an inverse."""
    return x / torch.full_like(x, number)


def _rounded_scale(amax: Tensor, format: Format, scale_format: Format) -> Tensor:
    """Return scales as numbers of ``scale_format``, those of blocks times one for the tensor."""
    if isinstance(scale_format, (PowersOfTwo, ScaleType)):
        return scale_format.snap_(_over(amax, format.qmax))
    if isinstance(scale_format, FloatFormat) and scale_format.mantissa_bits == 0:
        exact = power_of_two_below(amax) / 2.0 ** (math.frexp(format.qmax)[1] - 1)
        # Rounding saturates infinity and NaN; adding 0 * amax makes them NaN again.
        return scale_format.snap_(exact) + 0.0 * amax
    scale = _over(amax, format.qmax)
    if scale.numel() == 0:
        return scale
    # One scale for the tensor brings the largest scale of a block to the largest number of its
    # format; each block's scale is rounded in units of it (NVFP4).
    largest = scale.amax()
    tensor_scale = torch.where(largest > 0, _over(largest, scale_format.qmax), 1.0)
    return scale_format.snap_(scale / tensor_scale) * tensor_scale


def widened_to_power_of_two(amax: Tensor, format: Format) -> Tensor:
    """Return the amax that a scale rounded up to a power of two stands for.

    The gradient passes straight through the rounded exponent (Jain et al., Trained Quantization
    Thresholds, MLSys 2020, section 3.2).
    """
    narrow = amax.detach()
    dead = is_dead(narrow, format)
    wide = scale_from_amax(narrow, format, POWER_OF_TWO) * format.qmax
    wide = torch.where(dead, narrow, wide)
    growth = torch.where(dead, 1.0, wide / narrow)
    return straight_through(amax * growth, wide)


def scale_and_zero_point(
    amin: Tensor, amax: Tensor, format: Format, scale_format: Format | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of asymmetric ranges, with gradients to their ends.

    Ends on the wrong side of 0 count as 0. A scale is 1 for a dead range and else a normal number;
    a zero point is a whole number of the dtype of ``amax`` from ``quant_min`` to ``quant_max``.
    Roundings pass gradients straight through.
    """
    scale = unrounded_scale(amin, amax, format)
    if scale_format is not None:
        rounded = scale_format.snap_(scale.detach().clone())
        scale = straight_through(scale, rounded)
    scale = torch.where(scale < torch.finfo(scale.dtype).tiny, 1.0, scale)
    position = format.quant_min - amin.clamp(max=0) / scale
    # A scale that was rounded down would move the zero point beyond the last code.
    point = position.detach().round().clamp(format.quant_min, format.quant_max)
    return scale, straight_through(position, point)


def unrounded_scale(amin: Tensor, amax: Tensor, format: Format) -> Tensor:
    """Return ``(amax - amin) / (quant_max - quant_min)`` of the range, widened to contain 0."""
    length = amax.clamp(min=0) - amin.clamp(max=0)
    return _over(length, format.quant_max - format.quant_min)


def divisor(amax: Tensor, scale: Tensor) -> Tensor:
    """Return what data is divided by: the scale, or infinity in dead ranges and for scales of 0."""
    # Only a dead range has the scale 1 with an amax below 1: in a live one amax is at least
    # qmax / 2 there, and qmax is at least 1.
    is_dead_range = (scale == 1) & (amax < 0.5)
    return torch.where(is_dead_range | (scale == 0), torch.inf, scale)


def slope_divisor(amax: Tensor, scale: Tensor) -> Tensor:
    """Return what data is divided by for the gradient of a range.

    It is :func:`divisor`, but for a dead range a tiny number: the gradient is then that of a range
    that clips every value, and one that training drove to zero can grow again.
    """
    divided_by = divisor(amax, scale)
    is_dead_range = torch.isinf(divided_by) & (scale == 1)
    return torch.where(is_dead_range, torch.finfo(scale.dtype).tiny, divided_by)
