"""Estimators: pure functions from a :class:`~torchq.calib.histogram.Histogram` and a format to an amax for each group.

All return float32 of ``histogram.shape`` on the histogram's device, never above the largest magnitude seen, and 0 for a
group that holds only zeros. They read the grid from the format and compute in float64, so the result is the same on every
device. mse and entropy look at every bin edge as a candidate, for all groups together, and need some 100 MB at most for a
histogram of 32 MiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.calib.histogram import Histogram
from torchq.errors import ConfigError
from torchq.formats import Format

__all__ = ["entropy", "largest", "mse", "percentile"]

# Scores (relative squared error, nats) closer than this are equal but for float64 rounding.
_TIE = 1e-12
# What is worked on at once: candidates of mse (1 MiB for 2048 bins, in the cache), groups of entropy (about 10 MB for each array).
_ROWS, _GROUPS = 64, 64


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
        raise ConfigError(
            f"percentile: got {percentile}; expected 0 < percentile <= 100, for example 99.99"
        )
    total = histogram.counts.cumsum(1).double()
    wanted = total[:, -1:] * (percentile / 100.0)
    index = torch.searchsorted(total, wanted).clamp_(max=total.shape[1] - 1)
    inside = histogram.counts.gather(1, index)
    part = (wanted - (total.gather(1, index) - inside)) / inside.clamp(min=1)
    value = ((index + part) * histogram.width.unsqueeze(1)).float().squeeze(1)
    return _bounded(torch.where(total[:, -1] > 0, value, torch.inf), histogram)


def mse(histogram: Histogram, format: Format) -> Tensor:
    """The bin edge with the least squared error of quantizing the bin centers, the largest such edge.

    The error of each center under each candidate does not depend on the counts, so all groups share one matrix of them.

    Args:
        histogram: the statistics.
        format: the grid.
    """
    if _grid(format, histogram) is None:
        return largest(histogram, format)
    counts = histogram.counts.double().t()
    centers = torch.arange(counts.shape[0], device=counts.device, dtype=torch.float64) + 0.5
    candidates = torch.arange(1, counts.shape[0] + 1, device=counts.device)
    errors = []
    for part in candidates.split(_ROWS):
        scale = (part.double() / format.qmax).unsqueeze(1)
        errors.append(format.snap_(centers / scale).mul_(scale).sub_(centers).square_() @ counts)
    energy = centers.square() @ counts  # 0, and the score NaN, where there is nothing to compare
    return _bounded(_least((torch.cat(errors) / energy).t(), candidates, histogram), histogram)


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
    # Most runs serve many candidates: take the logarithm of each once.
    names = border[:, :-1] * (bins + 1) + border[:, 1:]
    runs, used = torch.unique(
        names.int() if bins < 1 << 15 else names, return_inverse=True
    )  # the narrower, the faster to sort
    begin, end = runs // (bins + 1), runs % (bins + 1)
    parts = histogram.counts.double().split(_GROUPS)
    divergences = [_divergence(counts.t(), begin, end, used, candidates) for counts in parts]
    return _bounded(_least(torch.cat(divergences), candidates, histogram), histogram)


def _divergence(
    counts: Tensor, begin: Tensor, end: Tensor, used: Tensor, candidates: Tensor
) -> Tensor:
    """(groups, candidates): the divergence of each candidate; NaN where there is nothing to compare.

    Args:
        counts: (bins, groups).
        begin, end: the first bin of each run, and the one after its last.
        used: (candidates, runs of a candidate): which they are, the last run last.
        candidates: their edges.
    """
    counts = torch.cat([counts[1:2], counts[1:]])
    total, occupied = _total_below(counts), _total_below((counts > 0).double())
    shared = total[end] - total[begin]
    mean_log = torch.log(shared / (occupied[end] - occupied[begin]).clamp_(min=1)).nan_to_num_(
        neginf=0.0
    )
    inside = torch.nn.functional.embedding_bag(used, shared.mul_(mean_log), mode="sum")
    beyond = total[-1] - total[candidates]
    last = counts[candidates - 1]
    reference = (
        _total_below(torch.xlogy(counts, counts))[candidates]
        - torch.xlogy(last, last)
        + torch.xlogy(last + beyond, last + beyond)
    )
    divergence = (reference - inside - beyond * mean_log[used[:, -1]]) / total[-1] - torch.log(
        total[-1] / total[candidates]
    )
    return torch.where((last == 0) & (beyond > 0), torch.inf, divergence).t()


def _grid(format: Format, histogram: Histogram) -> Tensor | None:
    """The non-negative grid values, float64; None where they are at least as fine as the bins, which then tell nothing."""
    values = [value for value in format.values if value >= 0]
    if len(values) >= histogram.counts.shape[1]:
        return None
    return torch.tensor(values, dtype=torch.float64, device=histogram.counts.device)


def _least(scores: Tensor, candidates: Tensor, histogram: Histogram) -> Tensor:
    """(groups,) float32: for each row of scores the largest candidate edge of least score within the data; infinity where none is."""
    counts = histogram.counts
    end = torch.where(
        counts > 0, torch.arange(1, counts.shape[1] + 1, device=counts.device), 0
    ).amax(1, keepdim=True)
    valid = candidates <= end
    score = torch.where(valid, scores, torch.inf).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    near = score <= score.amin(1, keepdim=True) + _TIE
    best = torch.where(near, candidates, 0).amax(1)
    return torch.where(valid.any(1), best.float() * histogram.width, torch.inf)


def _bounded(amax: Tensor, histogram: Histogram) -> Tensor:
    return torch.minimum(amax, histogram.amax).reshape(histogram.shape)


def _total_below(values: Tensor) -> Tensor:
    """(bins + 1, groups): the sum of all values before each index."""
    return torch.nn.functional.pad(values.cumsum(0), (0, 0, 1, 0))
