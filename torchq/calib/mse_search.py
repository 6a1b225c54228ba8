"""The range of a tensor that is at hand, such as a weight: tried out on the tensor itself instead of on statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.calib.statistics import whole
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Format, Granularity, PerTensor
from torchq.functional import compute_dtype, dequantize, quantize, reduce_amax

__all__ = ["search_amax"]

_PER_TENSOR = PerTensor()
_SMALLEST = 0.2
_PIECE = 1 << 17


def search_amax(
    x: Tensor,
    format: Format,
    granularity: Granularity = _PER_TENSOR,
    *,
    scale_format: Format | None = None,
    candidates: int = 81,
) -> Tensor:
    """The amax of least squared quantization error for each group, among equal fractions of its largest magnitude.

    Every candidate fake-quantizes the whole tensor, so the error is the real one, for any format and granularity, blocks with
    rounded scales included. Costs about ``candidates`` fake-quantizations of x.

    Args:
        x: floating point, any shape; empty gives zeros.
        format: the grid.
        granularity: which elements share one amax.
        scale_format: see :func:`torchq.functional.scale_from_amax`.
        candidates: how many fractions between 0.2 and 1 to try, at least 2; the default is every hundredth.

    Returns:
        float32 (float64 for float64) of ``granularity.amax_shape(x.shape)``; of equal errors the largest amax.

    Raises:
        CalibrationError: x holds a NaN or an infinity.
        ConfigError: fewer than 2 candidates.

    Example:
        >>> from torchq.formats import INT4
        >>> search_amax(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] * 100 + [10.0]), INT4)
        tensor(7.)
    """
    if candidates < 2:
        raise ConfigError(f"candidates: got {candidates}; expected at least 2")
    shape = granularity.amax_shape(x.shape)
    with torch.inference_mode(False), torch.no_grad():
        x = whole(x.detach()).to(compute_dtype(x.dtype))
        if scale_format is None and x.numel() and x.dim() and shape[:1] == x.shape[:1]:
            # Rows do not share an amax, so each piece can stay in the cache through all candidates.
            rows = max(1, _PIECE * x.shape[0] // x.numel())
            return torch.cat(
                [_search(part, format, granularity, None, candidates) for part in x.split(rows)]
            )
        return _search(x, format, granularity, scale_format, candidates)


def _search(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    scale_format: Format | None,
    candidates: int,
) -> Tensor:
    largest = reduce_amax(x, granularity)
    if not torch.isfinite(largest).all():
        raise CalibrationError("search_amax: got NaN or infinite values; expected a finite tensor")
    best, least = largest, torch.full_like(largest, torch.inf)
    for i in range(candidates):
        amax = largest * (1.0 - (1.0 - _SMALLEST) * i / (candidates - 1))
        codes = quantize(x, amax, format, granularity, scale_format)
        error = _squared_error(
            x,
            dequantize(codes, amax, format, granularity, scale_format),
            granularity,
            largest.shape,
        )
        better = error < least
        best, least = torch.where(better, amax, best), torch.where(better, error, least)
    return best


def _squared_error(
    x: Tensor, quantized: Tensor, granularity: Granularity, shape: torch.Size
) -> Tensor:
    parts = granularity.split(quantized.sub_(x).square_())
    dims = granularity.reduce_dims(parts.dim())
    return (parts.sum(dims) if dims else parts).view(shape)
