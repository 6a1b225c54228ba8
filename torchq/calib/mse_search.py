"""Search for the amax of a tensor that exists as a whole, such as a weight.

An estimator knows only a histogram; a search quantizes the tensor itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.calib.statistics import gather_full_tensor
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Format, Granularity, PerTensor
from torchq.functional import compute_dtype, dequantize, quantize, reduce_amax

__all__ = ["search_amax"]

_PER_TENSOR = PerTensor()
_SMALLEST_FRACTION = 0.2
# Elements of a piece that stays in the second-level cache.
_PIECE = 1 << 17


def search_amax(
    x: Tensor,
    format: Format,
    granularity: Granularity = _PER_TENSOR,
    *,
    scale_format: Format | None = None,
    candidates: int = 81,
) -> Tensor:
    """Return the amax of least squared quantization error for each group.

    The candidates are equal fractions of the group's largest magnitude. Each candidate
    fake-quantizes the whole tensor, so the error is exact for every format and granularity,
    including blocks with rounded scales. The cost is about ``candidates`` fake-quantizations.

    Args:
        x: floating point, any shape; an empty tensor gives zeros.
        format: the number format.
        granularity: which elements share one amax.
        scale_format: see :func:`torchq.functional.scale_from_amax`.
        candidates: number of fractions between 0.2 and 1, at least 2. The default tries every
            hundredth.

    Returns:
        float32 (float64 for float64) of ``granularity.amax_shape(x.shape)``. Of candidates with
        equal errors the largest is returned.

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
        x = gather_full_tensor(x.detach()).to(compute_dtype(x.dtype))
        rows_are_independent = x.dim() > 0 and shape[:1] == x.shape[:1]
        if scale_format is not None or not x.numel() or not rows_are_independent:
            return _search(x, format, granularity, scale_format, candidates)
        # Rows do not share an amax, so each piece stays in the cache through all candidates.
        rows = max(1, _PIECE * x.shape[0] // x.numel())
        found = [_search(part, format, granularity, None, candidates) for part in x.split(rows)]
        return torch.cat(found)


def _search(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    scale_format: Format | None,
    candidates: int,
) -> Tensor:
    """Try all candidates on ``x`` and return the best amax of each group."""
    largest = reduce_amax(x, granularity)
    if not torch.isfinite(largest).all():
        raise CalibrationError("search_amax: got NaN or infinite values; expected a finite tensor")
    best_amax, least_error = largest, torch.full_like(largest, torch.inf)
    for i in range(candidates):
        amax = largest * (1.0 - (1.0 - _SMALLEST_FRACTION) * i / (candidates - 1))
        codes = quantize(x, amax, format, granularity, scale_format)
        values = dequantize(codes, amax, format, granularity, scale_format)
        error = _squared_error(x, values, granularity, largest.shape)
        is_better = error < least_error
        best_amax = torch.where(is_better, amax, best_amax)
        least_error = torch.where(is_better, error, least_error)
    return best_amax


def _squared_error(
    x: Tensor, quantized: Tensor, granularity: Granularity, shape: torch.Size
) -> Tensor:
    """Return the squared error of each group in the given amax shape; overwrite ``quantized``."""
    parts = granularity.split(quantized.sub_(x).square_())
    dims = granularity.reduce_dims(parts.dim())
    return (parts.sum(dims) if dims else parts).view(shape)
