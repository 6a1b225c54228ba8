"""Histograms of magnitudes with integer counts and bins whose width is a power of two.

Bin ``i`` of a group counts the elements with ``i * width <= |x| < (i + 1) * width``, where
``width = 2**exponent`` and ``exponent`` is the smallest for which every magnitude seen fits. A
wider range merges neighbouring bins exactly, since ``floor(floor(y) / 2) == floor(y / 2)``.
Multiplying by a power of two is exact in float32, so the bin ``floor(|x| * 2**-k)`` is exact as
well. The same data therefore give the same histogram in any number of batches, in any order, on any
device and from any number of ranks.

Work is done in pieces that fit the cache. Off the CPU nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.calib.observer import Observer, Reduce, is_on_host
from torchq.errors import ConfigError
from torchq.formats import Granularity, PerAxis, PerTensor
from torchq.functional.kernels.views import pieces
from torchq.utils import short_repr

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
            self.counts.to(device),
            self.width.to(device),
            self.amax.to(device),
            self.shape,
        )


class HistogramObserver(Observer):
    """Statistics that are one :class:`Histogram` over all groups.

    At least half of the bins lie within the range seen. The memory is ``8 * groups * bins``
    bytes; the number of bins is halved until that is at most 32 MiB.
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
        self.num_bins = num_bins
        super().__init__(granularity, signed=signed)

    def settings(self) -> tuple[object, ...]:
        """Return what must be equal on every rank."""
        return (*super().settings(), self.num_bins)

    def histogram(self) -> Histogram:
        """Return the statistics so far; they share memory with this observer until it observes."""
        assert self.shape is not None
        return Histogram(
            self.counts, power_of_two(self.exponent), self.amax, self.shape
        )

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
        self.exponent = torch.full(
            (groups,), MIN_EXPONENT, dtype=torch.int32, device=device
        )
        self.amax = torch.zeros(groups, dtype=torch.float32, device=device)

    def _move(self, device: torch.device) -> None:
        self.counts = self.counts.to(device)
        self.exponent = self.exponent.to(device)
        self.amax = self.amax.to(device)

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        needed = bin_exponent(amax, self.counts.shape[1])
        self._widen(torch.maximum(self.exponent, needed))
        self.amax = torch.maximum(self.amax, amax)
        # Every magnitude is below ``bins`` times the width.
        inverse_width = power_of_two(-self.exponent)
        if not is_on_host(parts):
            count_on_device_(self.counts, parts, inverse_width, finite, self.signed)
        elif finite:
            count_on_cpu_(self.counts, parts, inverse_width, self.signed)

    def _widen(self, exponent: Tensor) -> None:
        """Widen the bins to ``exponent``, which is nowhere below the present one."""
        # Off the CPU, comparing would wait for the device; merging by zero doublings costs less.
        if is_on_host(exponent) and torch.equal(exponent, self.exponent):
            return
        self.counts = merge_bins(self.counts, exponent - self.exponent)
        self.exponent = exponent

    def exchange(self, batches: list[int], rank: int, reduce: Reduce) -> None:
        """Add the counts of all ranks, in bins of the widest."""
        self.amax = reduce("max", self.amax)
        self._widen(reduce("max", self.exponent))
        self.counts = reduce("sum", self.counts)


# Both 2**k and 2**-k are normal float32 numbers for every exponent k from here to 126.
MIN_EXPONENT = -126
# Temporaries of a CPU piece fit the second-level cache; those of a device piece take at most a
# few hundred MB.
_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24
# Indices below this number fit int16, which is faster to write and to count than int32.
_INT16_INDICES = 1 << 15


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2.0 ** exponent`` as exact float32, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def bin_exponent(amax: Tensor, num_bins: int) -> Tensor:
    """Return the smallest ``k >= -126`` with ``amax < num_bins * 2**k``, elementwise and exact."""
    mantissa, exponent = torch.frexp(amax)
    limit, shift = math.frexp(num_bins)
    exponent = exponent - shift + (mantissa >= limit).to(torch.int32)
    return torch.where(amax > 0, exponent.clamp(min=MIN_EXPONENT), MIN_EXPONENT).to(
        torch.int32
    )


def merge_bins(counts: Tensor, doublings: Tensor) -> Tensor:
    """Return new counts, (groups, bins), with the width of each row doubled ``doublings`` times."""
    groups, bins = counts.shape
    # Shifting by the width of the type or more is undefined on some devices.
    shift = doublings.clamp(max=62).to(torch.int64).unsqueeze(1)
    index = torch.arange(bins, device=counts.device) >> shift
    index = index + torch.arange(groups, device=counts.device).unsqueeze(1) * bins
    merged = torch.zeros_like(counts).view(-1)
    merged.scatter_add_(0, index.view(-1), counts.reshape(-1))
    return merged.view(groups, bins)


def count_on_cpu_(
    counts: Tensor, x: Tensor, inverse_width: Tensor, signed: bool
) -> None:
    """Add the histogram of finite ``x`` in host memory to ``counts`` in place.

    ``counts`` is (groups, bins) int64, ``x`` is (before, groups, after), and ``inverse_width`` is
    that of each group.
    """
    bins = counts.shape[1]
    max_groups = max(1, _INT16_INDICES // bins)
    size = min(_CPU_PIECE, x.numel())
    dtype = torch.int16 if max_groups * bins <= _INT16_INDICES else torch.int32
    offset = torch.arange(
        0, max_groups * bins, bins, dtype=dtype, device=x.device
    ).view(-1, 1)
    # All pieces share two buffers, because allocating memory costs more than the arithmetic.
    scaled_buffer = torch.empty(size, dtype=torch.float32, device=x.device)
    index_buffer = torch.empty(size, dtype=dtype, device=x.device)
    for part, where in pieces(x, size=size, groups=max_groups):
        groups = part.shape[1]
        scaled = scaled_buffer[: part.numel()].view(part.shape)
        index = index_buffer[: part.numel()].view(part.shape)
        _write_bin_indices(part, inverse_width[where], signed, scaled, index)
        if groups > 1:
            index.add_(offset[:groups])
        counts[where] += torch.bincount(index.view(-1), minlength=groups * bins).view(
            groups, bins
        )


def count_on_device_(
    counts: Tensor, x: Tensor, inverse_width: Tensor, finite: Tensor, signed: bool
) -> None:
    """Do the same on any device, without waiting for it; add nothing if ``finite`` is False."""
    groups, bins = counts.shape
    offset = torch.arange(0, groups * bins, bins, device=x.device)
    one = finite.to(torch.int64)
    for part, where in pieces(x, size=_DEVICE_PIECE, groups=groups):
        scaled = torch.empty(part.shape, dtype=torch.float32, device=x.device)
        index = torch.empty(part.shape, dtype=torch.int64, device=x.device)
        _write_bin_indices(part, inverse_width[where], signed, scaled, index)
        # A NaN converts to an arbitrary integer. Its index must be valid although it adds 0.
        index.clamp_(0, bins - 1).add_(offset[where].view(-1, 1))
        # torch.use_deterministic_algorithms allows only the one-dimensional form on CUDA.
        counts.view(-1).scatter_add_(0, index.view(-1), one.expand(index.numel()))


def _write_bin_indices(
    part: Tensor, inverse_width: Tensor, signed: bool, scaled: Tensor, index: Tensor
) -> None:
    """Write the bin of each element of ``part`` to ``index``; ``scaled`` is float32 scratch."""
    shape = () if inverse_width.numel() == 1 else (-1, 1)
    inverse_width = inverse_width.view(shape)
    if part.dtype is torch.float32:
        torch.mul(part, inverse_width, out=scaled)
    else:
        scaled.copy_(part).mul_(inverse_width)
    if signed:
        # The conversion truncates towards zero, so the sign can be dropped afterwards, where the
        # elements are smaller.
        index.copy_(scaled).abs_()
    else:
        index.copy_(scaled.clamp_(min=0))
