"""Calibrators by the name of their method, as descriptors and :func:`torchq.calibrate` give it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torchq.calib.calibrator import ESTIMATORS, Calibrator, HistogramCalibrator, MaxCalibrator
from torchq.errors import ConfigError
from torchq.formats import Format, Granularity
from torchq.utils import Registry

__all__ = ["CALIBRATORS", "make_calibrator", "methods"]

#: ``factory(*, format, granularity, **options) -> Calibrator`` for the methods that are no function of a histogram.
CALIBRATORS: Registry[str, Callable[..., Calibrator]] = Registry("calibration method")


def _moving_average(*, momentum: float = 0.9, **options: Any) -> Calibrator:
    return MaxCalibrator(momentum=momentum, **options)


CALIBRATORS.add("max", MaxCalibrator)
CALIBRATORS.add("moving_average", _moving_average)
CALIBRATORS.add("histogram", HistogramCalibrator)


def methods() -> tuple[str, ...]:
    """The names that :func:`make_calibrator` knows: those of ``CALIBRATORS``, and of ``ESTIMATORS`` for histograms.

    >>> methods()
    ('max', 'moving_average', 'histogram', 'percentile', 'mse', 'entropy')
    """
    return tuple(dict.fromkeys((*CALIBRATORS, *ESTIMATORS)))


def make_calibrator(
    method: str, *, format: Format, granularity: Granularity, **options: Any
) -> Calibrator:
    """A new calibrator whose ``compute_amax()`` gives ``method``.

    Args:
        method: one of :func:`methods`; ``"histogram"`` gives entropy by default.
        format: the grid to calibrate for.
        granularity: which elements share one amax.
        options: ``momentum`` (moving_average); ``num_bins``, ``skip_zeros`` and the method's own, such as ``percentile`` (histograms).

    Raises:
        ConfigError: an unknown method or option, or a granularity that the method does not have.

    Example:
        >>> from torchq.formats import INT8, PerTensor
        >>> make_calibrator("percentile", format=INT8, granularity=PerTensor(), percentile=99.9).method
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
