"""amax <-> scale: the one place with this arithmetic, and with the rule for dead ranges.

``scale = amax / format.qmax`` (what ONNX and PyTorch call *scale*), in fp32, in fp64 for fp64 data. A range of at most
:data:`TINY` quantizes everything to exactly 0, and its scale is 1, so that every scale is a positive number. An infinite or
NaN amax gives NaN: a poisoned range must be seen, not hidden.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.formats import FloatFormat, Format, power_of_two_below

__all__ = ["TINY", "compute_dtype", "scale_from_amax", "amax_from_scale", "divisor"]

#: Ranges up to here (inclusive) are dead. 2**-24 is the smallest fp16 subnormal.
TINY = 2.0**-24


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that quantization computes in: fp64 for fp64 tensors, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def scale_from_amax(amax: Tensor, format: Format, scale_format: Format | None = None) -> Tensor:
    """The scale for each amax.

    Args:
        amax: float32 or float64, any shape, >= 0. With ``scale_format``, all blocks of one tensor.
        format: the grid; amax maps to its ``qmax``.
        scale_format: round the scales onto this grid. A format without mantissa bits (E8M0) takes
            ``2**(floor(log2(amax)) - floor(log2(qmax)))`` (OCP Microscaling Formats 1.0, section 6.3); any other gets a
            second, per-tensor scale that brings the largest scale to its maximum (NVFP4).

    Returns:
        amax's shape and dtype, > 0 for a finite amax; 1 where amax <= :data:`TINY`.

    Example:
        >>> from torchq.formats import INT8
        >>> scale_from_amax(torch.tensor([127.0, 0.0]), INT8)
        tensor([1., 1.])
    """
    scale = (
        _over(amax, format.qmax)
        if scale_format is None
        else _rounded_scale(amax, format, scale_format)
    )
    return torch.where(amax <= TINY, 1.0, scale)


def _over(x: Tensor, number: float) -> Tensor:
    """``x / number`` with one rounding: on CUDA torch divides by a Python number as a multiplication by its inverse."""
    return x / torch.full_like(x, number)


def _rounded_scale(amax: Tensor, format: Format, scale_format: Format) -> Tensor:
    if isinstance(scale_format, FloatFormat) and scale_format.mantissa_bits == 0:
        exact = power_of_two_below(amax) / 2.0 ** (math.frexp(format.qmax)[1] - 1)
        return (
            scale_format.snap_(exact) + 0.0 * amax
        )  # keeps inf and NaN visible, which snapping saturates
    scale = _over(amax, format.qmax)
    if scale.numel() == 0:
        return scale
    shared = torch.where(scale.amax() > 0, _over(scale.amax(), scale_format.qmax), 1.0)
    return scale_format.snap_(scale / shared) * shared


def amax_from_scale(scale: Tensor, format: Format) -> Tensor:
    """Inverse of :func:`scale_from_amax` for live ranges: ``scale * format.qmax``."""
    return scale * format.qmax


def divisor(amax: Tensor, scale: Tensor) -> Tensor:
    """What data is divided by: the scale, and infinity for dead ranges so that their codes are 0.

    A scale that was rounded to zero (a block far below its neighbours in NVFP4) is dead as well.
    """
    return torch.where((amax <= TINY) | (scale == 0), torch.inf, scale)
