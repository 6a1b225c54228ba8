"""Counting magnitudes into bins whose width is a power of two: exact, chunked, and without a host sync off the CPU.

A bin index is ``floor(|x| * 2**-k)``. Scaling by a power of two is exact in float32, so the index is too, and
``floor(floor(y) / 2) == floor(y / 2)`` makes doubling the width the same as counting again with the wider bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.calib.statistics import on_host
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

# Keeps both 2**k and 2**-k normal float32 numbers for every k in use.
MIN_EXPONENT = -126
# Temporaries of a CPU piece stay in the second-level cache; those of a device piece stay within a few hundred MB.
_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24
# Indices up to here fit int16: the narrower the index, the faster it is made and counted.
_NARROW = 1 << 15


def power_of_two(exponent: Tensor) -> Tensor:
    """``2.0 ** exponent`` in float32, exactly (``pow`` may be an ulp off), for int32 exponents in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def bin_exponent(amax: Tensor, num_bins: int) -> Tensor:
    """The smallest ``k >= -126`` with ``amax < num_bins * 2**k``, int32, elementwise and exact.

    Args:
        amax: float32, finite, >= 0.
        num_bins: at least 4.
    """
    mantissa, exponent = torch.frexp(amax)
    top, shift = math.frexp(num_bins)
    exponent = (exponent - shift + (mantissa >= top).to(torch.int32)).clamp(min=MIN_EXPONENT)
    return torch.where(amax > 0, exponent, MIN_EXPONENT).to(torch.int32)


def merge_bins(counts: Tensor, doublings: Tensor) -> Tensor:
    """``counts`` after doubling the bin width of each row ``doublings`` times.

    Args:
        counts: (groups, bins) int64.
        doublings: (groups,) integer, >= 0.

    Returns:
        (groups, bins) int64, a new tensor of the same row sums.
    """
    groups, bins = counts.shape
    # A shift by the width of the type or more is not defined everywhere.
    index = torch.arange(bins, device=counts.device) >> doublings.clamp(max=62).to(
        torch.int64
    ).unsqueeze(1)
    index = index + torch.arange(groups, device=counts.device).unsqueeze(1) * bins
    return (
        torch.zeros_like(counts)
        .view(-1)
        .scatter_add_(0, index.view(-1), counts.reshape(-1))
        .view(groups, bins)
    )


def count_bins_(
    counts: Tensor, x: Tensor, exponent: Tensor, finite: Tensor, *, signed: bool, skip_zeros: bool
) -> None:
    """Add the histogram of ``x`` to ``counts``, in place. Adds nothing when ``finite`` is False.

    Args:
        counts: (groups, bins) int64.
        x: (before, groups, after) floating point; every magnitude below ``bins * 2**exponent`` of its group.
        exponent: (groups,) int32, log2 of the bin width.
        finite: 0-d bool; whether ``x`` is free of NaN and infinities.
        signed: whether negative values count by magnitude; otherwise they count as zeros.
        skip_zeros: leave exact zeros out.
    """
    scale = power_of_two(-exponent)
    if on_host(x):
        if finite:
            count_on_cpu_(counts, x, scale, signed, skip_zeros)
    else:
        count_on_device_(counts, x, scale, finite, signed, skip_zeros)


def count_on_cpu_(counts: Tensor, x: Tensor, scale: Tensor, signed: bool, skip_zeros: bool) -> None:
    """:func:`count_bins_` for finite data in host memory; ``scale`` is the inverse width."""
    bins = counts.shape[1]
    most, size = max(1, _NARROW // bins), min(_CPU_PIECE, x.numel())
    dtype = torch.int16 if most * bins <= _NARROW else torch.int32
    offset = torch.arange(0, most * bins, bins, dtype=dtype).view(-1, 1)
    # One pair of buffers for all pieces: fresh memory for each would cost more than the arithmetic.
    scaled, narrow = torch.empty(size), torch.empty(size, dtype=dtype)
    for part, where in pieces(x, size=size, groups=most):
        groups, count = part.shape[1], part.numel()
        index = _bins(
            part,
            scale[where],
            signed,
            scaled[:count].view(part.shape),
            narrow[:count].view(part.shape),
        )
        if groups > 1:
            index.add_(offset[:groups])
        counts[where] += torch.bincount(index.view(-1), minlength=groups * bins).view(groups, bins)
        if skip_zeros:
            counts[where, 0] -= _zeros(part, signed)


def count_on_device_(
    counts: Tensor, x: Tensor, scale: Tensor, finite: Tensor, signed: bool, skip_zeros: bool
) -> None:
    """:func:`count_bins_` for any device, without a host sync; ``scale`` is the inverse width."""
    groups, bins = counts.shape
    offset = torch.arange(0, groups * bins, bins, device=x.device)
    one = finite.to(torch.int64)
    for part, where in pieces(x, size=_DEVICE_PIECE, groups=groups):
        # A NaN converts to anything; the index must stay in range although nothing is added.
        scaled, index = (
            torch.empty(part.shape, device=x.device),
            torch.empty(part.shape, dtype=torch.int64, device=x.device),
        )
        index = (
            _bins(part, scale[where], signed, scaled, index)
            .clamp_(0, bins - 1)
            .add_(offset[where].view(-1, 1))
        )
        # Flat, because only the one-dimensional form is allowed under torch.use_deterministic_algorithms on CUDA.
        counts.view(-1).scatter_add_(0, index.view(-1), one.expand(index.numel()))
        if skip_zeros:
            counts[where, 0] -= _zeros(part, signed) * one


def _bins(part: Tensor, scale: Tensor, signed: bool, scaled: Tensor, index: Tensor) -> Tensor:
    """The bin of each element, written to ``index`` by way of the float32 ``scaled``, both of the part's shape."""
    scale = scale.view(()) if scale.numel() == 1 else scale.view(-1, 1)
    if part.dtype is torch.float32:
        torch.mul(part, scale, out=scaled)
    else:
        scaled.copy_(part).mul_(scale)
    if not signed:
        return index.copy_(scaled.clamp_(min=0))
    # Conversion truncates towards zero, so the sign may go afterwards, where the elements are smaller.
    return index.copy_(scaled).abs_()


def _zeros(part: Tensor, signed: bool) -> Tensor:
    """(groups,): the elements that count as zero."""
    other = torch.count_nonzero(part, dim=(0, 2)) if signed else (part > 0).sum((0, 2))
    return part.shape[0] * part.shape[2] - other
