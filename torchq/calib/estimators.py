"""Estimators: pure functions from a :class:`~torchq.calib.histogram.Histogram` and a format to an amax for each group.

All return float32 of ``histogram.shape`` on the histogram's device, never above the largest magnitude seen, and 0 for a
group that holds only zeros. They read the grid from the format and compute in float64, so the result is the same on every
device. For a histogram of B bins and a format of L non-negative values, mse and entropy look at every bin edge as a candidate
and cost O(B * L) each, because sums over the bins that share a code are differences of running totals.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchq.calib.histogram import Histogram
from torchq.errors import ConfigError
from torchq.formats import Format

__all__ = ["entropy", "largest", "mse", "percentile"]

# Scores (relative squared error, nats) closer than this are equal but for float64 rounding.
_TIE = 1e-12


def largest(histogram: Histogram, format: Format) -> Tensor:
    """The largest magnitude seen, exactly."""
    return histogram.amax.reshape(histogram.shape).clone()


def percentile(histogram: Histogram, format: Format, *, percentile: float = 99.99) -> Tensor:
    """The magnitude below which ``percentile`` percent of the elements lie, interpolated within its bin.

    Args:
        histogram: the statistics.
        format: not used; every estimator takes it.
        percentile: 0 < percentile <= 100; 100 gives the largest magnitude.

    Raises:
        ConfigError: a percentile out of range.
    """
    if not 0.0 < percentile <= 100.0:
        raise ConfigError(f"percentile: got {percentile}; expected 0 < percentile <= 100, for example 99.99")
    total = histogram.counts.cumsum(1).double()
    wanted = total[:, -1:] * (percentile / 100.0)
    index = torch.searchsorted(total, wanted).clamp_(max=total.shape[1] - 1)
    inside = histogram.counts.gather(1, index)
    part = (wanted - (total.gather(1, index) - inside)) / inside.clamp(min=1)
    value = ((index + part) * histogram.width.unsqueeze(1)).float().squeeze(1)
    return _bounded(torch.where(total[:, -1] > 0, value, torch.inf), histogram)


def mse(histogram: Histogram, format: Format) -> Tensor:
    """The bin edge with the least squared error of quantizing the bin centers, the largest such edge.

    With grid values ``g_0 < g_1 < ..``, ``s = amax / qmax`` and ``x`` running over bin centers, the error is
    ``sum x^2 - 2 s sum g(x) x + s^2 sum g(x)^2``. Writing ``g`` as a sum of its increments turns the last two into running
    totals of ``count * x`` and ``count`` read where one code changes to the next.

    Args:
        histogram: the statistics.
        format: the grid.
    """
    grid = _grid(format, histogram)
    if grid is None:
        return largest(histogram, format)
    bins = histogram.counts.shape[1]
    candidates = torch.arange(1, bins + 1, device=grid.device)
    step = candidates.double() / format.qmax
    # How many centers round to a code below the next one.
    border = torch.outer(step, (grid[1:] + grid[:-1]) / 2).add_(0.5).floor_().long()
    centers = torch.arange(bins, device=grid.device, dtype=torch.float64) + 0.5
    errors = (_squared_error(row, centers, border, grid, step) for row in histogram.counts.double())
    return _bounded(_least(errors, candidates, histogram), histogram)


def _squared_error(counts: Tensor, centers: Tensor, border: Tensor, grid: Tensor, step: Tensor) -> Tensor:
    """The error of each candidate for one group, over the sum of squares; NaN where there is nothing to compare."""
    above = _total_above(counts)
    moment_above = _total_above(counts * centers)
    product = moment_above[border] @ grid.diff() + grid[0] * moment_above[0]
    square = above[border] @ (grid * grid).diff() + grid[0] ** 2 * above[0]
    energy = (counts * centers * centers).sum()
    return (energy - 2 * step * product + step * step * square) / energy


def entropy(histogram: Histogram, format: Format) -> Tensor:
    """The bin edge where quantizing loses least information: the least Kullback-Leibler divergence, the largest such edge.

    For each edge the reference distribution is the histogram up to it, with everything beyond added to its last bin. The
    quantized one cuts the bins into runs, one per grid value up to the next (the last as long as the one before), and gives
    every occupied bin the mean count of the occupied bins of its run. Edges whose last bin is empty while counts lie beyond
    are impossible (infinite divergence). The first bin, which holds the exact zeros of ReLU and padding, takes the count of its
    neighbour: zero is on every grid, so it tells nothing about the range.

    Reference: Migacz, 8-bit inference with TensorRT (GTC 2017); the runs are its equal ones for integer formats, and the first
    bin is treated as in NVIDIA pytorch-quantization.
    """
    grid = _grid(format, histogram)
    if grid is None:
        return largest(histogram, format)
    bins = histogram.counts.shape[1]
    candidates = torch.arange(grid.numel(), bins + 1, device=grid.device)
    starts = torch.cat([grid, 2 * grid[-1:] - grid[-2:-1]])
    border = torch.outer(candidates.double(), starts).div_(starts[-1]).ceil_().long()
    divergences = (_divergence(row, border, candidates) for row in histogram.counts.double())
    return _bounded(_least(divergences, candidates, histogram), histogram)


def _divergence(counts: Tensor, border: Tensor, candidates: Tensor) -> Tensor:
    """The divergence of each candidate for one group; NaN where there is nothing to compare."""
    counts = torch.cat([counts[1:2], counts[1:]])
    total = _total_below(counts)
    shared = total[border].diff(dim=1)
    occupied = _total_below((counts > 0).double())[border].diff(dim=1)
    mean_log = torch.log(shared / occupied.clamp(min=1)).nan_to_num_(neginf=0.0)
    beyond = total[-1] - total[candidates]
    last = counts[candidates - 1]
    reference = _total_below(torch.xlogy(counts, counts))[candidates] - torch.xlogy(last, last) + torch.xlogy(last + beyond, last + beyond)
    divergence = (reference - (shared * mean_log).sum(1) - beyond * mean_log[:, -1]) / total[-1] - torch.log(total[-1] / total[candidates])
    return torch.where((last == 0) & (beyond > 0), torch.inf, divergence)


def _grid(format: Format, histogram: Histogram) -> Tensor | None:
    """The non-negative grid values, float64; None where they are at least as fine as the bins, which then tell nothing."""
    values = [value for value in format.values if value >= 0]
    if len(values) >= histogram.counts.shape[1]:
        return None
    return torch.tensor(values, dtype=torch.float64, device=histogram.counts.device)


def _least(scores: Iterable[Tensor], candidates: Tensor, histogram: Histogram) -> Tensor:
    """(groups,) float32: for each group the largest candidate edge of least score within the data; infinity where none is."""
    counts = histogram.counts
    end = torch.where(counts > 0, torch.arange(1, counts.shape[1] + 1, device=counts.device), 0).amax(1, keepdim=True)
    valid = candidates <= end
    score = torch.where(valid, torch.stack(tuple(scores)), torch.inf).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    near = score <= score.amin(1, keepdim=True) + _TIE
    best = torch.where(near, candidates, 0).amax(1)
    return torch.where(valid.any(1), best.float() * histogram.width, torch.inf)


def _bounded(amax: Tensor, histogram: Histogram) -> Tensor:
    return torch.minimum(amax, histogram.amax).reshape(histogram.shape)


def _total_below(values: Tensor) -> Tensor:
    """(bins + 1,): the sum of all values before each index."""
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))


def _total_above(values: Tensor) -> Tensor:
    """(bins + 1,): the sum of all values from each index on."""
    return torch.nn.functional.pad(values.flip(0).cumsum(0).flip(0), (0, 1))
