"""Histograms of magnitudes: integer counts are the truth, the bin edges follow from one integer per group.

Bin ``i`` of a group holds the elements with ``i * width <= |x| < (i + 1) * width`` and ``width = 2**exponent``, where
``exponent`` is the smallest for which every magnitude seen fits. A wider range merges neighbouring bins, exactly: the same
data give the same histogram in any number of batches, in any order, on any device and from any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.calib.binning import MIN_EXPONENT, bin_exponent, count_bins_, merge_bins, power_of_two
from torchq.calib.observer import Exchange, Observer, Reduce
from torchq.calib.statistics import on_host
from torchq.errors import ConfigError
from torchq.formats import Granularity, PerAxis, PerTensor

__all__ = ["MAX_COUNTS", "Histogram", "HistogramObserver"]

#: Counts that one observer keeps at most (8 bytes each: 32 MiB). With more groups than fit, each has fewer bins.
MAX_COUNTS = 1 << 22
_FEWEST_BINS = 128


@dataclass(frozen=True)
class Histogram:
    """What the estimators read.

    Attributes:
        counts: (groups, bins) int64.
        width: (groups,) float32, the bin width, a power of two.
        amax: (groups,) float32, the exact largest magnitude.
        shape: shape of an amax, with ``groups`` elements.
    """

    counts: Tensor
    width: Tensor
    amax: Tensor
    shape: tuple[int, ...] = ()

    @property
    def edges(self) -> Tensor:
        """(groups, bins + 1) float32: the edges of the bins, exact."""
        return torch.arange(
            self.counts.shape[1] + 1, device=self.width.device
        ) * self.width.unsqueeze(1)

    def to(self, device: torch.device | str) -> Histogram:
        """The same histogram on ``device``."""
        return Histogram(
            self.counts.to(device), self.width.to(device), self.amax.to(device), self.shape
        )


class HistogramObserver(Observer):
    """A :class:`Histogram` of each group. At least half of the bins lie within the range seen.

    Memory: ``8 * groups * bins`` bytes; the number of bins halves until that is at most 32 MiB.

    Args:
        granularity: per tensor or per axis.
        num_bins: bins of each group, at least 16.
        skip_zeros: leave exact zeros (of ReLU or padding) out of the counts.

    Raises:
        ConfigError: another granularity, fewer than 16 bins, or too many groups for 128 bins each.
    """

    counts: Tensor
    exponent: Tensor
    amax: Tensor

    def __init__(
        self,
        granularity: Granularity,
        *,
        signed: bool = True,
        num_bins: int = 2048,
        skip_zeros: bool = False,
    ) -> None:
        if not isinstance(granularity, (PerTensor, PerAxis)):
            raise ConfigError(
                f"histogram: got {granularity}; expected one amax per tensor or per axis, since a block holds too few elements for a "
                "histogram. Use method 'max', for weights also 'mse', or ranges of each call (dynamic=True)"
            )
        if num_bins < 16:
            raise ConfigError(f"num_bins: got {num_bins}; expected at least 16")
        self.num_bins = num_bins
        self.skip_zeros = skip_zeros
        super().__init__(granularity, signed=signed)

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.num_bins, self.skip_zeros)

    def histogram(self) -> Histogram:
        """The statistics so far. Shares memory with the observer: read it before observing on."""
        assert self.shape is not None
        return Histogram(self.counts, power_of_two(self.exponent), self.amax, self.shape)

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        groups = torch.Size(shape).numel()
        bins = self.num_bins
        while groups * bins > MAX_COUNTS and bins >= 2 * _FEWEST_BINS:
            bins //= 2
        if groups * bins > MAX_COUNTS:
            raise ConfigError(
                f"histogram: got {groups} groups; expected at most {MAX_COUNTS // bins} with {bins} bins. Use method='max'"
            )
        self.counts = torch.zeros(groups, bins, dtype=torch.int64, device=device)
        self.exponent = torch.full((groups,), MIN_EXPONENT, dtype=torch.int32, device=device)
        self.amax = torch.zeros(groups, dtype=torch.float32, device=device)

    def _move(self, device: torch.device) -> None:
        self.counts, self.exponent, self.amax = (
            self.counts.to(device),
            self.exponent.to(device),
            self.amax.to(device),
        )

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        self._grow(torch.maximum(self.exponent, bin_exponent(amax, self.counts.shape[1])))
        self.amax = torch.maximum(self.amax, amax)
        count_bins_(
            self.counts,
            parts,
            self.exponent,
            finite,
            signed=self.signed,
            skip_zeros=self.skip_zeros,
        )

    def _grow(self, exponent: Tensor) -> None:
        """Widen the bins to ``exponent``, nowhere below the present one."""
        # Off the CPU, looking would wait for the device; merging by zero doublings costs less.
        if on_host(exponent) and torch.equal(exponent, self.exponent):
            return
        self.counts = merge_bins(self.counts, exponent - self.exponent)
        self.exponent = exponent

    def _merge(self, other: Observer, device: torch.device) -> None:
        assert isinstance(other, HistogramObserver)
        exponent = other.exponent.to(device)
        self._grow(torch.maximum(self.exponent, exponent))
        self.counts = self.counts + merge_bins(other.counts.to(device), self.exponent - exponent)
        self.amax = torch.maximum(self.amax, other.amax.to(device))

    def exchange(self, batches: list[int], rank: int) -> Exchange:
        self.amax = yield Reduce("max", self.amax)
        self._grow((yield Reduce("max", self.exponent)))
        self.counts = yield Reduce("sum", self.counts)
