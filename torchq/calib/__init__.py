"""Statistics of tensors, and the quantization ranges that follow from them.

Four words have one meaning each:

* An *observer* gathers statistics of the tensors that it is given
  (:mod:`~torchq.calib.observer`, :mod:`~torchq.calib.histogram`).
* An *estimator* is a pure function from a histogram to an amax
  (:mod:`~torchq.calib.estimators`).
* A *search* is a pure function from a tensor to a range; it serves tensors that exist as a
  whole, such as weights (:mod:`~torchq.calib.search`).
* A *calibrator* owns an observer, or one for each side of zero, and computes the range of one
  quantizer from it (:mod:`~torchq.calib.calibrator`).

A new method is one function and its entry in ``ESTIMATORS`` (for a function of a histogram), in
``SEARCHES`` (for a function of the tensor itself), or in ``OBSERVERS`` (for an :class:`Observer`
with a ``result()``: statistics of its own). The contract tests run over all entries.

This package may import errors, utils, formats and functional.
"""

from torchq.calib.calibrator import (
    ESTIMATORS,
    OBSERVERS,
    SEARCHES,
    Calibrator,
    methods,
)
from torchq.calib.distributed import sync
from torchq.calib.histogram import Histogram
from torchq.calib.observer import Observer
from torchq.calib.search import search_range

__all__ = [
    "ESTIMATORS",
    "OBSERVERS",
    "SEARCHES",
    "Calibrator",
    "Histogram",
    "Observer",
    "methods",
    "search_range",
    "sync",
]
