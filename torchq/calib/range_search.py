"""Search for both ends of an asymmetric range by the error of quantization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchq.calib.statistics import gather_full_tensor
from torchq.errors import CalibrationError
from torchq.formats import Format, Granularity, PerTensor
from torchq.functional import (
    compute_dtype,
    fake_quantize,
    reduce_range,
    scale_and_zero_point,
)

__all__ = ["minimize_range", "search_range", "total_error"]

_PER_TENSOR = PerTensor()
# Ends are tried at every fiftieth between a fifth and all of the range seen.
_FRACTIONS = [i / 50 for i in range(50, 9, -1)]
# Elements that are quantized together; they fit the second-level cache.
_PIECE = 1 << 17

#: ``error(amin, amax)`` of each group, of the shape of the ends.
Error = Callable[[Tensor, Tensor], Tensor]


def minimize_range(amin: Tensor, amax: Tensor, error: Error) -> tuple[Tensor, Tensor]:
    """Return the ends of least error for each group.

    First both ends shrink by one fraction, then the upper, the lower, and both again in turn. Of
    equal errors the wider range wins.

    Args:
        amin: the smallest value of each group, <= 0, any shape.
        amax: the largest value of each group, >= 0, of the same shape.
        error: what is to be small.
    """
    best = (amin, amax)
    least = error(*best)
    for shrinks_low, shrinks_high in ((1, 1), (0, 1), (1, 0), (0, 1), (1, 0)):
        start = best
        for fraction in _FRACTIONS:
            low = amin * fraction if shrinks_low else start[0]
            high = amax * fraction if shrinks_high else start[1]
            found = error(low, high)
            better = found < least
            best = torch.where(better, low, best[0]), torch.where(better, high, best[1])
            least = torch.where(better, found, least)
    return best


def total_error(
    values: Tensor,
    counts: Tensor,
    amin: Tensor,
    amax: Tensor,
    format: Format,
    power: float,
    scale_format: Format | None = None,
) -> Tensor:
    """Return ``sum(counts * |error| ** power)`` of each group of values.

    Args:
        values: (groups, n) float64.
        counts: (groups, n) float64: how often each value occurs.
        amin: (groups,) float32: the lower ends.
        amax: (groups,) float32: the upper ends.
        format: an integer format.
        power: > 0.
        scale_format: None, or :data:`torchq.formats.POWER_OF_TWO`.

    Returns:
        (groups,) float64.
    """
    ends = amin.double(), amax.double()
    scale, point = (t.unsqueeze(1) for t in scale_and_zero_point(*ends, format, scale_format))
    rows = max(1, _PIECE // values.shape[1])
    errors = []
    for some in torch.arange(len(values), device=values.device).split(rows):
        codes = (values[some] / scale[some]).round_().add_(point[some])
        codes = codes.clamp_(format.quant_min, format.quant_max).sub_(point[some])
        error = codes.mul_(scale[some]).sub_(values[some])
        error = error.square_() if power == 2.0 else error.abs_().pow_(power)
        errors.append(error.mul_(counts[some]).sum(1))
    return torch.cat(errors)


def search_range(
    x: Tensor,
    format: Format,
    granularity: Granularity = _PER_TENSOR,
    *,
    scale_format: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the range of least squared quantization error for each group of a whole tensor.

    It is :func:`torchq.calib.search_amax` for asymmetric ranges.

    Args:
        x: floating point, any shape; an empty tensor gives zeros.
        format: an integer format.
        granularity: which elements share one range.
        scale_format: None, or :data:`torchq.formats.POWER_OF_TWO`.

    Returns:
        ``(amin, amax)``, float32 (float64 for float64) of ``granularity.amax_shape(x.shape)``.

    Raises:
        CalibrationError: x holds a NaN or an infinity.
    """
    with torch.inference_mode(False), torch.no_grad():
        x = gather_full_tensor(x.detach()).to(compute_dtype(x.dtype))
        amin, amax = reduce_range(x, granularity)
        if not torch.isfinite(amax - amin).all():
            raise CalibrationError(
                "search_range: got NaN or infinite values; expected a finite tensor"
            )

        def error(low: Tensor, high: Tensor) -> Tensor:
            values = fake_quantize(x, high, format, granularity, scale_format, amin=low)
            parts = granularity.split(values.sub_(x).square_())
            dims = granularity.reduce_dims(parts.dim())
            return (parts.sum(dims) if dims else parts).view(amax.shape)

        return minimize_range(amin, amax, error) if x.numel() else (amin, amax)
