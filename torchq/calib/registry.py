"""Calibration methods by name, as descriptors and :func:`torchq.calibrate` give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from torchq.calib.calibrator import ESTIMATORS, Calibrator, HistogramCalibrator, MaxCalibrator
from torchq.calib.mse_search import search_amax
from torchq.calib.range_search import search_range
from torchq.errors import ConfigError
from torchq.formats import Format, Granularity
from torchq.functional import reduce_amax, reduce_range
from torchq.utils import Registry

__all__ = [
    "CALIBRATORS",
    "RANGE_SEARCHES",
    "SEARCHES",
    "find_range_search",
    "find_search",
    "make_calibrator",
    "methods",
]

#: ``factory(*, format, granularity, **options) -> Calibrator`` of the methods that do not read a
#: histogram.
CALIBRATORS: Registry[str, Callable[..., Calibrator]] = Registry("calibration method")

#: ``search(x, format, granularity, *, scale_format) -> amax``: for a tensor that exists as a whole
#: (a weight), what a method does in place of a calibrator.
SEARCHES: Registry[str, Callable[..., Tensor]] = Registry("range search")

#: ``search(x, format, granularity, *, scale_format) -> (amin, amax)``: the same for asymmetric
#: ranges.
RANGE_SEARCHES: Registry[str, Callable[..., tuple[Tensor, Tensor]]] = Registry("range search")


def _make_moving_average(*, momentum: float = 0.9, **options: Any) -> Calibrator:
    """Return a calibrator whose momentum has the documented default."""
    return MaxCalibrator(momentum=momentum, **options)


CALIBRATORS.add("max", MaxCalibrator)
CALIBRATORS.add("moving_average", _make_moving_average)
CALIBRATORS.add("histogram", HistogramCalibrator)
SEARCHES.add("mse", search_amax)
RANGE_SEARCHES.add("mse", search_range)


def _largest(x: Tensor, format: Format, granularity: Granularity, **options: Any) -> Tensor:
    """Return the largest magnitudes: without the inputs of a layer no error is known."""
    return reduce_amax(x, granularity)


def _whole_range(
    x: Tensor, format: Format, granularity: Granularity, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the whole ranges, for the same reason."""
    return reduce_range(x, granularity)


SEARCHES.add("activation", _largest)
RANGE_SEARCHES.add("activation", _whole_range)


def methods() -> tuple[str, ...]:
    """Return the names that :func:`make_calibrator` knows.

    These are the names in ``CALIBRATORS``, then those in ``ESTIMATORS``, which read a histogram.

    >>> {"max", "mse", "entropy"} <= set(methods())
    True
    """
    return tuple(dict.fromkeys((*CALIBRATORS, *ESTIMATORS)))


def find_search(
    method: str, options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
) -> Callable[..., Tensor] | None:
    """Return the search that ``method`` uses on a tensor that exists as a whole, or None.

    Args:
        method: one of :func:`methods`.
        options: the options of the method. They configure a calibrator, so with any option there
            is no search.

    >>> find_search("mse") is search_amax
    True
    >>> find_search("mse", {"num_bins": 512}) is None and find_search("max") is None
    True
    """
    return None if options else SEARCHES.get(method)


def find_range_search(
    method: str, options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return what :func:`find_search` returns, for asymmetric ranges.

    Args:
        method: one of :func:`methods`.
        options: the options of the method.
    """
    return None if options else RANGE_SEARCHES.get(method)


def make_calibrator(
    method: str, *, format: Format, granularity: Granularity, **options: Any
) -> Calibrator:
    """Return a new calibrator whose ``compute_amax()`` uses ``method``.

    Args:
        method: one of :func:`methods`; ``"histogram"`` uses entropy by default.
        format: the number format to calibrate for.
        granularity: which elements share one amax.
        options: ``momentum`` for moving_average; ``num_bins``, ``skip_zeros`` and the options of
            the method itself, such as ``percentile``, for histograms.

    Raises:
        ConfigError: an unknown method or option, or a granularity without support for the method.

    Example:
        >>> from torchq.formats import INT8, PerTensor
        >>> calibrator = make_calibrator(
        ...     "percentile", format=INT8, granularity=PerTensor(), percentile=99.9
        ... )
        >>> calibrator.method
        'percentile'
    """
    if method not in methods():
        raise ConfigError(
            f"unknown calibration method {method!r}; expected one of: {', '.join(methods())}"
        )
    factory = CALIBRATORS.get(method) or partial(HistogramCalibrator, method=method)
    try:
        return factory(format=format, granularity=granularity, **options)
    except TypeError as error:
        raise ConfigError(
            f"calibration method {method!r}: got options {sorted(options)}; {error}"
        ) from None
