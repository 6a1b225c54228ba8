"""Histograms of magnitudes with integer counts and bins whose width is a power of two.

Bin ``i`` of a group counts the elements with ``i * width <= |x| < (i + 1) * width``, where
``width = 2**exponent`` and ``exponent`` is the smallest for which every magnitude seen fits. A
wider range merges neighbouring bins exactly. The same data therefore give the same histogram in
any number of batches, in any order, on any device and from any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.calib.binning import MIN_EXPONENT, bin_exponent, count_bins_, merge_bins, power_of_two
from torchq.calib.observer import Exchange, Observer, Reduce
from torchq.calib.statistics import is_on_host
from torchq.errors import ConfigError
from torchq.formats import Granularity, PerAxis, PerTensor
from torchq.utils import short_repr

__all__ = ["MAX_COUNTS", "Histogram", "HistogramObserver"]

#: The most counts that one observer keeps (8 bytes each, 32 MiB). More groups get fewer bins each.
MAX_COUNTS = 1 << 22
_MIN_BINS = 16
# mse tries every edge against every bin, which takes seconds for this number.
_MAX_BINS = 1 << 16
_FEWEST_SHARED_BINS = 128


@dataclass(frozen=True)
class Histogram:
    """The statistics that estimators read.

    Attributes:
        counts: (groups, bins) int64.
        width: (groups,) float32, the bin width, a power of two.
        amax: (groups,) float32, the exact largest magnitude.
        shape: the shape of an amax; it has ``groups`` elements.
    """

    counts: Tensor
    width: Tensor
    amax: Tensor
    shape: tuple[int, ...] = ()

    @property
    def edges(self) -> Tensor:
        """The exact edges of the bins, (groups, bins + 1) float32."""
        index = torch.arange(self.counts.shape[1] + 1, device=self.width.device)
        return index * self.width.unsqueeze(1)

    def to(self, device: torch.device | str) -> Histogram:
        """Return the same histogram on ``device``."""
        return Histogram(
            self.counts.to(device), self.width.to(device), self.amax.to(device), self.shape
        )


class HistogramObserver(Observer):
    """Statistics that are one :class:`Histogram` over all groups.

    At least half of the bins lie within the range seen. The memory is ``8 * groups * bins``
    bytes; the number of bins is halved until that is at most 32 MiB.

    Args:
        granularity: per tensor or per axis.
        signed: see :class:`~torchq.calib.observer.Observer`.
        num_bins: bins of each group, 16 to 65536.
        skip_zeros: True leaves exact zeros (of ReLU or padding) out of the counts.

    Raises:
        ConfigError: the granularity is per block, or ``num_bins`` is out of range. While
            observing: there are too many groups for 128 bins each.
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
                f"histogram: got {granularity}; expected one amax per tensor or per axis, because "
                "a block holds too few elements for a histogram. Use method 'max', for weights "
                "also 'mse', or the range of each call (dynamic=True)"
            )
        if type(num_bins) is not int or not _MIN_BINS <= num_bins <= _MAX_BINS:
            raise ConfigError(
                f"num_bins: got {short_repr(num_bins)}; "
                f"expected an integer, at least {_MIN_BINS} and at most {_MAX_BINS}"
            )
        if not isinstance(skip_zeros, bool):
            raise ConfigError(f"skip_zeros: got {short_repr(skip_zeros)}; expected True or False")
        self.num_bins = num_bins
        self.skip_zeros = skip_zeros
        super().__init__(granularity, signed=signed)

    def settings(self) -> tuple[object, ...]:
        """Return what must be equal between observers that are merged."""
        return (*super().settings(), self.num_bins, self.skip_zeros)

    def histogram(self) -> Histogram:
        """Return the statistics so far, which share memory with this observer.

        Read the histogram before the next call of :meth:`observe`.
        """
        assert self.shape is not None
        return Histogram(self.counts, power_of_two(self.exponent), self.amax, self.shape)

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        groups = torch.Size(shape).numel()
        bins = self.num_bins
        while groups * bins > MAX_COUNTS and bins >= 2 * _FEWEST_SHARED_BINS:
            bins //= 2
        if groups * bins > MAX_COUNTS:
            raise ConfigError(
                f"histogram: got {groups} groups; expected at most {MAX_COUNTS // bins} "
                f"with {bins} bins. Use method='max'"
            )
        self.counts = torch.zeros(groups, bins, dtype=torch.int64, device=device)
        self.exponent = torch.full((groups,), MIN_EXPONENT, dtype=torch.int32, device=device)
        self.amax = torch.zeros(groups, dtype=torch.float32, device=device)

    def _move(self, device: torch.device) -> None:
        self.counts = self.counts.to(device)
        self.exponent = self.exponent.to(device)
        self.amax = self.amax.to(device)

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        needed = bin_exponent(amax, self.counts.shape[1])
        self._widen(torch.maximum(self.exponent, needed))
        self.amax = torch.maximum(self.amax, amax)
        count_bins_(
            self.counts,
            parts,
            self.exponent,
            finite,
            signed=self.signed,
            skip_zeros=self.skip_zeros,
        )

    def _widen(self, exponent: Tensor) -> None:
        """Widen the bins to ``exponent``, which is nowhere below the present one."""
        # Off the CPU, comparing would wait for the device; merging by zero doublings costs less.
        if is_on_host(exponent) and torch.equal(exponent, self.exponent):
            return
        self.counts = merge_bins(self.counts, exponent - self.exponent)
        self.exponent = exponent

    def _merge(self, other: Observer, device: torch.device) -> None:
        assert isinstance(other, HistogramObserver)
        exponent = other.exponent.to(device)
        self._widen(torch.maximum(self.exponent, exponent))
        self.counts = self.counts + merge_bins(other.counts.to(device), self.exponent - exponent)
        self.amax = torch.maximum(self.amax, other.amax.to(device))

    def exchange(self, batches: list[int], rank: int) -> Exchange:
        """Combine the histograms of all ranks; see :meth:`Observer.exchange`."""
        self.amax = yield Reduce("max", self.amax)
        self._widen((yield Reduce("max", self.exponent)))
        self.counts = yield Reduce("sum", self.counts)
