"""Search for the range of least error: of whole tensors such as weights, or of binned values.

An estimator knows only a histogram; a search quantizes the tensor itself.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torchq.calib.observer import gather_full_tensor
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Format, Granularity, PerTensor, ScaleType
from torchq.functional import Range, compute_dtype, dequantize, fake_quantize, quantize
from torchq.functional.scale import scale_and_zero_point

_PER_TENSOR = PerTensor()
_SMALLEST_FRACTION = 0.2
# Elements of a piece that stays in the second-level cache.
_PIECE = 1 << 17


def search_range(
    x: Tensor,
    format: Format,
    granularity: Granularity = _PER_TENSOR,
    *,
    symmetric: bool = True,
    scale_format: Format | None = None,
    candidates: int = 81,
) -> Range:
    """Return the range of least squared quantization error for each group.

    The candidates for a symmetric range are equal fractions of the group's largest magnitude. Each
    candidate fake-quantizes the whole tensor, so the error is exact for every format and
    granularity, including blocks with rounded scales. The cost is about ``candidates``
    fake-quantizations. Both ends of an asymmetric range first shrink together, then in turn.

    Args:
        x: floating point, any shape; an empty tensor gives zeros.
        format: the number format; an integer format for asymmetric ranges.
        granularity: which elements share one range.
        symmetric: False finds both ends.
        scale_format: see :func:`torchq.functional.scale_from_amax`; of asymmetric ranges None or
            :data:`torchq.formats.POWER_OF_TWO`.
        candidates: number of fractions between 0.2 and 1, at least 2. The default tries every
            hundredth. For symmetric ranges.

    Returns:
        float32 (float64 for float64) of ``granularity.amax_shape(x.shape)``. Of candidates with
        equal errors the widest is returned.

    Raises:
        CalibrationError: x holds a NaN or an infinity.
        ConfigError: fewer than 2 candidates.

    Example:
        >>> from torchq.formats import INT4
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] * 100 + [10.0])
        >>> search_range(x, INT4).high
        tensor(7.)
    """
    if candidates < 2:
        raise ConfigError(f"candidates: got {candidates}; expected at least 2")
    with torch.inference_mode(False), torch.no_grad():
        x = gather_full_tensor(x.detach()).to(compute_dtype(x.dtype))
        whole = Range.of(x, granularity, symmetric=symmetric)
        length = whole.high if whole.low is None else whole.high - whole.low
        if not torch.isfinite(length).all():
            raise CalibrationError(
                "search_range: got NaN or infinite values; expected a finite tensor"
            )
        if x.numel() == 0:
            return whole
        if not symmetric:
            return _search_ends(x, whole, format, granularity, scale_format)

        def best(x: Tensor, largest: Tensor) -> Tensor:
            def error(amax: Tensor) -> Tensor:
                codes = quantize(x, amax, format, granularity, scale_format)
                values = dequantize(codes, amax, format, granularity, scale_format)
                return _squared_error(x, values, granularity, largest.shape)

            # From the whole range down in equal steps, so that of equal errors the widest wins.
            steps = (
                (1.0 - _SMALLEST_FRACTION) * i / (candidates - 1)
                for i in range(candidates)
            )
            tried = [(largest * (1.0 - step),) for step in steps]
            (amax,) = least_error(tried, error)
            return amax

        rows_are_independent = x.dim() > 0 and whole.high.shape[:1] == x.shape[:1]
        joins_rows = scale_format is not None and not isinstance(
            scale_format, ScaleType
        )
        if joins_rows or not rows_are_independent:
            return Range(best(x, whole.high))
        # Rows do not share an amax, so each piece stays in the cache through all candidates.
        rows = max(1, _PIECE * x.shape[0] // x.numel())
        pieces = zip(x.split(rows), whole.high.split(rows), strict=True)
        return Range(torch.cat([best(piece, largest) for piece, largest in pieces]))


def _search_ends(
    x: Tensor,
    whole: Range,
    format: Format,
    granularity: Granularity,
    scale_format: Format | None,
) -> Range:
    """Return the best ends of each group of ``x`` within the whole range."""
    assert whole.low is not None

    def error(low: Tensor, high: Tensor) -> Tensor:
        values = fake_quantize(x, high, format, granularity, scale_format, amin=low)
        return _squared_error(x, values, granularity, high.shape)

    low, high = minimize_range(whole.low, whole.high, error)
    return Range(high, low)


def least_error(
    candidates: Iterable[tuple[Tensor, ...]], error: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Return the candidate of least ``error(*candidate)`` for each group; of equal ones the first.

    The tensors of all candidates have the shape of the error.
    """
    best: tuple[Tensor, ...] = ()
    for candidate in candidates:
        candidate_error = error(*candidate)
        if not best:
            best = candidate
            least = torch.full_like(candidate_error, torch.inf)
        is_better = candidate_error < least
        best = tuple(
            torch.where(is_better, new, old)
            for new, old in zip(candidate, best, strict=True)
        )
        least = torch.where(is_better, candidate_error, least)
    return best


def _squared_error(
    x: Tensor, quantized: Tensor, granularity: Granularity, shape: torch.Size
) -> Tensor:
    """Return the squared error of each group in the given amax shape; overwrite ``quantized``."""
    parts = granularity.split(quantized.sub_(x).square_())
    dims = granularity.reduce_dims(parts.dim())
    return (parts.sum(dims) if dims else parts).view(shape)


# Ends are tried at every fiftieth between a fifth and all of the range seen.
_FRACTIONS = [i / 50 for i in range(50, 9, -1)]


def minimize_range(
    amin: Tensor, amax: Tensor, error: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the ends of least ``error(amin, amax)`` for each group, the wider of equal ones.

    First both ends shrink by one fraction, then the upper, the lower, and both again in turn.
    """
    best = amin, amax
    for shrinks_low, shrinks_high in ((1, 1), (0, 1), (1, 0), (0, 1), (1, 0)):
        candidates = [best]
        for fraction in _FRACTIONS:
            low = amin * fraction if shrinks_low else best[0]
            high = amax * fraction if shrinks_high else best[1]
            candidates.append((low, high))
        low, high = least_error(candidates, error)
        best = low, high
    return best


def total_error(
    values: Tensor,
    counts: Tensor,
    amin: Tensor,
    amax: Tensor,
    format: Format,
    scale_format: Format | None = None,
) -> Tensor:
    """Return ``sum(counts * error ** 2)`` of each group; both are (groups, n)."""
    scale, point = scale_and_zero_point(
        amin.double(), amax.double(), format, scale_format
    )
    rows = max(1, _PIECE // values.shape[1])
    pieces = zip(
        values.split(rows),
        counts.split(rows),
        scale.unsqueeze(1).split(rows),
        point.unsqueeze(1).split(rows),
        strict=True,
    )
    errors = []
    for values_p, counts_p, scale_p, point_p in pieces:
        codes = (values_p / scale_p).round_().add_(point_p)
        codes.clamp_(format.quant_min, format.quant_max).sub_(point_p)
        error = codes.mul_(scale_p).sub_(values_p).square_()
        errors.append(error.mul_(counts_p).sum(1))
    return torch.cat(errors)
