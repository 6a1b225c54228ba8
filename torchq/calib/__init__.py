"""Statistics of tensors and the ranges (amax) that follow from them.

An *observer* gathers (:mod:`~torchq.calib.observer`, :mod:`~torchq.calib.histogram`), an *estimator* is a pure function of what it
gathered (:mod:`~torchq.calib.estimators`), a *calibrator* is both. May import errors, utils, formats and functional. A new method is a
function of a histogram added to ``ESTIMATORS``, or else a :class:`Calibrator` added to ``CALIBRATORS``; the contract suite runs over all.
"""

from torchq.calib.calibrator import ESTIMATORS, Calibrator, HistogramCalibrator, MaxCalibrator
from torchq.calib.distributed import sync
from torchq.calib.histogram import Histogram
from torchq.calib.mse_search import search_amax
from torchq.calib.registry import CALIBRATORS, make_calibrator, methods

__all__ = [
    "CALIBRATORS",
    "ESTIMATORS",
    "Calibrator",
    "Histogram",
    "HistogramCalibrator",
    "MaxCalibrator",
    "make_calibrator",
    "methods",
    "search_amax",
    "sync",
]
