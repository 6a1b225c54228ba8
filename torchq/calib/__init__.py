"""Statistics of tensors, and the quantization ranges (amax) that follow from them.

Four words have one meaning each:

* An *observer* gathers statistics of the tensors that it is given
  (:mod:`~torchq.calib.observer`, :mod:`~torchq.calib.histogram`).
* An *estimator* is a pure function from a histogram to an amax
  (:mod:`~torchq.calib.estimators`).
* A *search* is a pure function from a tensor to an amax; it serves tensors that exist as a
  whole, such as weights (:mod:`~torchq.calib.mse_search`).
* A *calibrator* owns an observer and computes the amax of one quantizer from it
  (:mod:`~torchq.calib.calibrator`), or both ends of an asymmetric range
  (:mod:`~torchq.calib.range_calibrator`).

A new method is one function and its entry in ``ESTIMATORS`` (for a function of a histogram), in
``SEARCHES`` (for a function of the tensor itself), or in ``CALIBRATORS`` (for a
:class:`Calibrator` with statistics of its own). The contract tests run over all entries.

This package may import errors, utils, formats and functional.
"""

from torchq.calib.calibrator import ESTIMATORS, Calibrator, HistogramCalibrator, MaxCalibrator
from torchq.calib.distributed import sync
from torchq.calib.histogram import Histogram
from torchq.calib.mse_search import search_amax
from torchq.calib.range_calibrator import RangeCalibrator
from torchq.calib.range_search import search_range
from torchq.calib.registry import (
    CALIBRATORS,
    RANGE_SEARCHES,
    SEARCHES,
    find_range_search,
    find_search,
    make_calibrator,
    methods,
)

__all__ = [
    "CALIBRATORS",
    "ESTIMATORS",
    "RANGE_SEARCHES",
    "SEARCHES",
    "Calibrator",
    "Histogram",
    "HistogramCalibrator",
    "MaxCalibrator",
    "RangeCalibrator",
    "find_range_search",
    "find_search",
    "make_calibrator",
    "methods",
    "search_amax",
    "search_range",
    "sync",
]
