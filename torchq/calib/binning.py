"""Counting of magnitudes in bins whose width is a power of two.

The bin of ``x`` is ``floor(|x| * 2**-k)``. Multiplying by a power of two is exact in float32, so
the bin is exact as well. Because ``floor(floor(y) / 2) == floor(y / 2)``, merging neighbouring
bins equals counting again with bins of twice the width.

Work is done in pieces that fit the cache. Off the CPU nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.calib.statistics import is_on_host
from torchq.functional.kernels import pieces

__all__ = [
    "MIN_EXPONENT",
    "bin_exponent",
    "count_bins_",
    "count_on_cpu_",
    "count_on_device_",
    "merge_bins",
    "power_of_two",
]

# Both 2**k and 2**-k are normal float32 numbers for every exponent k from here to 126.
MIN_EXPONENT = -126
# Temporaries of a CPU piece fit the second-level cache; those of a device piece take at most a
# few hundred MB.
_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24
# Indices below this number fit int16, which is faster to write and to count than int32.
_INT16_INDICES = 1 << 15


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2.0 ** exponent`` as exact float32, for int32 exponents from -126 to 127.

    ``torch.pow`` may be off by one unit in the last place.
    """
    return ((exponent + 127) << 23).view(torch.float32)


def bin_exponent(amax: Tensor, num_bins: int) -> Tensor:
    """Return the smallest ``k >= -126`` with ``amax < num_bins * 2**k``, elementwise and exact.

    Args:
        amax: float32, finite, >= 0.
        num_bins: at least 4.

    Returns:
        int32 of the shape of ``amax``.
    """
    mantissa, exponent = torch.frexp(amax)
    limit, shift = math.frexp(num_bins)
    exponent = exponent - shift + (mantissa >= limit).to(torch.int32)
    return torch.where(amax > 0, exponent.clamp(min=MIN_EXPONENT), MIN_EXPONENT).to(torch.int32)


def merge_bins(counts: Tensor, doublings: Tensor) -> Tensor:
    """Double the bin width of each row ``doublings`` times.

    Args:
        counts: (groups, bins) int64.
        doublings: (groups,) integer, >= 0.

    Returns:
        (groups, bins) int64, a new tensor with the same row sums.
    """
    groups, bins = counts.shape
    # Shifting by the width of the type or more is undefined on some devices.
    shift = doublings.clamp(max=62).to(torch.int64).unsqueeze(1)
    index = torch.arange(bins, device=counts.device) >> shift
    index = index + torch.arange(groups, device=counts.device).unsqueeze(1) * bins
    merged = torch.zeros_like(counts).view(-1)
    merged.scatter_add_(0, index.view(-1), counts.reshape(-1))
    return merged.view(groups, bins)


def count_bins_(
    counts: Tensor, x: Tensor, exponent: Tensor, finite: Tensor, *, signed: bool, skip_zeros: bool
) -> None:
    """Add the histogram of ``x`` to ``counts`` in place; add nothing if ``finite`` is False.

    Args:
        counts: (groups, bins) int64.
        x: (before, groups, after) floating point. Every magnitude of a group is below
            ``bins * 2**exponent`` of that group.
        exponent: (groups,) int32, log2 of the bin width.
        finite: 0-d bool, True if ``x`` holds no NaN and no infinity.
        signed: True counts negative values by magnitude, False counts them as zeros.
        skip_zeros: True leaves exact zeros out.
    """
    inverse_width = power_of_two(-exponent)
    if not is_on_host(x):
        count_on_device_(counts, x, inverse_width, finite, signed, skip_zeros)
    elif finite:
        count_on_cpu_(counts, x, inverse_width, signed, skip_zeros)


def count_on_cpu_(
    counts: Tensor, x: Tensor, inverse_width: Tensor, signed: bool, skip_zeros: bool
) -> None:
    """Do the work of :func:`count_bins_` for finite data in host memory."""
    bins = counts.shape[1]
    max_groups = max(1, _INT16_INDICES // bins)
    size = min(_CPU_PIECE, x.numel())
    dtype = torch.int16 if max_groups * bins <= _INT16_INDICES else torch.int32
    offset = torch.arange(0, max_groups * bins, bins, dtype=dtype, device=x.device).view(-1, 1)
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
        counts[where] += torch.bincount(index.view(-1), minlength=groups * bins).view(groups, bins)
        if skip_zeros:
            counts[where, 0] -= _count_zeros(part, signed)


def count_on_device_(
    counts: Tensor,
    x: Tensor,
    inverse_width: Tensor,
    finite: Tensor,
    signed: bool,
    skip_zeros: bool,
) -> None:
    """Do the work of :func:`count_bins_` on any device, without waiting for it."""
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
        if skip_zeros:
            counts[where, 0] -= _count_zeros(part, signed) * one


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


def _count_zeros(part: Tensor, signed: bool) -> Tensor:
    """Return the number of elements of each group that count as zero, (groups,)."""
    nonzero = torch.count_nonzero(part, dim=(0, 2)) if signed else (part > 0).sum((0, 2))
    return part.shape[0] * part.shape[2] - nonzero
