"""Calibration of asymmetric ranges: the two ends of [amin, amax] from the sides of zero.

Each side is the business of a calibrator of its own: one sees the positive values, one the negative
ones. So every calibration method finds an asymmetric range, and ranks and batches agree as they do
for symmetric ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.calib import estimators
from torchq.calib.binning import merge_bins
from torchq.calib.calibrator import Calibrator, HistogramCalibrator, check_options
from torchq.calib.histogram import Histogram
from torchq.calib.range_search import minimize_range, total_error
from torchq.calib.registry import make_calibrator
from torchq.formats import Format, Granularity, IntFormat, integer

__all__ = ["RangeCalibrator"]


class RangeCalibrator:
    """Finds the range [amin, amax] of one quantizer from the tensors it is given.

    * The methods ``max``, ``moving_average`` and ``percentile`` treat each side by itself. A
      percentile of 99.9 lets 0.1 % of the values lie above the range, and 0.1 % below.
    * ``mse`` and ``lp`` choose both ends together: first one fraction for both, then each in turn.
    * ``entropy`` takes the threshold that it finds for the magnitudes, and no more of a side than
      its largest value, as ONNX Runtime does.

    Args:
        method: one of :func:`torchq.calib.methods`.
        format: an integer format.
        granularity: which elements share one range.
        options: of the method; see :func:`torchq.calib.make_calibrator`.

    Attributes:
        scale_format: see :class:`torchq.calib.Calibrator`.

    Raises:
        ConfigError: see :func:`torchq.calib.make_calibrator`.

    Example:
        >>> from torchq.formats import UINT8, PerTensor
        >>> calibrator = RangeCalibrator("max", format=UINT8, granularity=PerTensor())
        >>> calibrator.collect(torch.tensor([-0.25, 0.0, 3.0]))
        >>> calibrator.compute_range()
        (tensor(-0.2500), tensor(3.))
    """

    def __init__(
        self, method: str, *, format: Format, granularity: Granularity, **options: Any
    ) -> None:
        self.format = format
        self.scale_format: Format | None = None
        side = integer(format.bits, unsigned=True)
        self.upper = make_calibrator(method, format=side, granularity=granularity, **options)
        self.lower = make_calibrator(method, format=side, granularity=granularity, **options)

    @property
    def sides(self) -> tuple[Calibrator, Calibrator]:
        """The calibrators of the positive and of the negative values."""
        return self.upper, self.lower

    @property
    def batches(self) -> int:
        """The number of non-empty tensors collected, known on the host."""
        return self.upper.batches

    @property
    def seen(self) -> bool:
        """True if any data was collected; reads no device memory."""
        return self.upper.seen

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics; see :meth:`torchq.calib.Calibrator.collect`."""
        self.upper.collect(x)
        self.lower.collect(x.detach().neg())

    def compute_range(self, method: str | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the range for everything collected so far; waits for the device.

        Args:
            method: default: the one it was made for; others need histograms.
            options: of the method, such as ``percentile=99.9``.

        Returns:
            ``(amin, amax)`` with ``amin <= 0 <= amax``, float32 of the shape of an amax each.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
        """
        own = self.upper.method if isinstance(self.upper, HistogramCalibrator) else ""
        if (method or own) not in ("mse", "lp", "entropy"):
            amin = -self.lower.compute_amax(method, **options)
            return amin, self.upper.compute_amax(method, **options)
        assert isinstance(self.upper, HistogramCalibrator)
        assert isinstance(self.lower, HistogramCalibrator)
        check_options(method or own, options, self.format)
        with torch.inference_mode(False), torch.no_grad():
            sides = self.upper.histogram(), self.lower.histogram()
            if (method or own) == "entropy":
                return _entropy_range(*sides, self.format)
            options = {**(self.upper.options if method in (None, own) else {}), **options}
            power = float(options.get("power", 2.0 if (method or own) == "mse" else 2.4))
            return _least_error(*sides, self.format, power, self.scale_format)


def _least_error(
    upper: Histogram,
    lower: Histogram,
    format: Format,
    power: float,
    scale_format: Format | None,
) -> tuple[Tensor, Tensor]:
    """Return the range of least error of the bin centers; see :func:`torchq.calib.estimators.lp`.

    The first bins are left out: their values round to 0, or nearly so, in every range.
    """
    device = upper.counts.device
    upper, lower = upper.to("cpu"), lower.to("cpu")
    centers = torch.cat([-_centers(lower), _centers(upper)], 1)
    counts = torch.cat([lower.counts[:, 1:], upper.counts[:, 1:]], 1).double()

    def error(amin: Tensor, amax: Tensor) -> Tensor:
        return total_error(centers, counts, amin, amax, format, power, scale_format)

    amin, amax = minimize_range(-lower.amax, upper.amax, error)
    return amin.view(lower.shape).to(device), amax.view(upper.shape).to(device)


def _centers(histogram: Histogram) -> Tensor:
    """Return the centers of all bins but the first, (groups, bins - 1) float64."""
    bins, device = histogram.counts.shape[1], histogram.width.device
    index = torch.arange(1, bins, dtype=torch.float64, device=device)
    return (index + 0.5) * histogram.width.double().unsqueeze(1)


def _entropy_range(upper: Histogram, lower: Histogram, format: Format) -> tuple[Tensor, Tensor]:
    """Return the threshold of the magnitudes, on each side at most its largest value."""
    assert isinstance(format, IntFormat)
    width = torch.maximum(upper.width, lower.width)
    sides = [
        merge_bins(side.counts, torch.log2(width / side.width).round().long())
        for side in (upper, lower)
    ]
    counts = sides[0] + sides[1]
    # Each side counts the values of the other one as zeros.
    counts[:, 0] = torch.minimum(sides[0][:, 0], sides[1][:, 0])
    largest = torch.maximum(upper.amax, lower.amax)
    magnitudes = Histogram(counts, width, largest, upper.shape)
    threshold = estimators.entropy(magnitudes.to("cpu"), integer(max(2, format.bits)))
    threshold = threshold.to(counts.device)
    ends = (torch.minimum(threshold, side.amax.view(side.shape)) for side in (lower, upper))
    amin, amax = ends
    return -amin, amax
