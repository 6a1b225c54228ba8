"""Estimators: pure functions from a histogram and a format to the amax of each group.

Every estimator takes a :class:`~torchq.calib.histogram.Histogram` and a
:class:`~torchq.formats.Format`, and returns float32 of ``histogram.shape`` on the histogram's
device. The result is never above the largest magnitude seen, and 0 for a group of zeros.

All of them compute in float64, so the result is the same on every device. mse and entropy try
every bin edge as a candidate, for all groups together; they need about 100 MB at most for a
histogram of 32 MiB.
"""

import torch
from torch import Tensor

from torchq.calib.histogram import Histogram, merge_bins
from torchq.calib.search import least_error, minimize_range, total_error
from torchq.errors import ConfigError
from torchq.formats import Format, integer_format
from torchq.functional import Range

# Scores (relative squared errors, nats) that differ by less are equal up to float64 rounding.
_TIE = 1e-12
# Candidates of mse that are tried together (1 MiB for 2048 bins, which fits the cache).
_CANDIDATES_TOGETHER = 64
# Groups of entropy that are processed together (about 10 MB for each temporary).
_GROUPS_TOGETHER = 64
# Runs of entropy that are processed together (4 MiB for each temporary). The 2048 bins and 129
# values of INT8 have half of them.
_RUNS_TOGETHER = 1 << 19


def largest(histogram: Histogram, format: Format) -> Tensor:
    """Return the largest magnitude seen, exactly."""
    return histogram.amax.reshape(histogram.shape).clone()


def percentile(
    histogram: Histogram, format: Format, *, percentile: float = 99.99
) -> Tensor:
    """Return the value that ``percentile`` % of the magnitudes do not exceed.

    The value is interpolated within its bin; 0 < percentile <= 100.
    """
    if not 0.0 < percentile <= 100.0:
        raise ConfigError(
            f"percentile: got {percentile}; expected 0 < percentile <= 100, for example 99.99"
        )
    cumulative = histogram.counts.cumsum(1).double()
    covered = cumulative[:, -1:] * (percentile / 100.0)
    # The bin in which that many counts are reached, and how far inside of it.
    index = torch.searchsorted(cumulative, covered).clamp_(max=cumulative.shape[1] - 1)
    in_bin = histogram.counts.gather(1, index)
    below_bin = cumulative.gather(1, index) - in_bin
    fraction = (covered - below_bin) / in_bin.clamp(min=1)
    value = ((index + fraction) * histogram.width.unsqueeze(1)).float().squeeze(1)
    return _limit_to_data(
        torch.where(cumulative[:, -1] > 0, value, torch.inf), histogram
    )


def mse(histogram: Histogram, format: Format) -> Tensor:
    """Return the bin edge with the least squared error of quantizing the bin centers.

    Of edges with equal errors the largest is returned.
    """
    if _non_negative_values(format, histogram) is None:
        return largest(histogram, format)
    counts = histogram.counts.double().t()
    centers = (
        torch.arange(counts.shape[0], device=counts.device, dtype=torch.float64) + 0.5
    )
    candidates = torch.arange(1, counts.shape[0] + 1, device=counts.device)
    # The error of a center under a candidate does not depend on the counts, so all groups share
    # one matrix of errors.
    errors = []
    for part in candidates.split(_CANDIDATES_TOGETHER):
        scale = (part.double() / format.qmax).unsqueeze(1)
        error = format.snap_(centers / scale).mul_(scale).sub_(centers)
        errors.append(error.square_() @ counts)
    # The energy is 0, and the score NaN, for a group without data.
    scores = (torch.cat(errors) / (centers.square() @ counts)).t()
    return _limit_to_data(_best_edge(scores, candidates, histogram), histogram)


def entropy(histogram: Histogram, format: Format) -> Tensor:
    """Return the bin edge with the least Kullback-Leibler divergence of the quantized histogram.

    Of edges with equal divergences the largest is returned. For each edge:

    * The reference distribution is the histogram up to the edge; its last bin also gets all
      counts beyond.
    * The quantized distribution divides the bins into runs: one run from each value of the format
      to the next, the last run as long as the one before it. Every occupied bin gets the mean
      count of the occupied bins of its run.
    * An edge whose last bin is empty while there are counts beyond is impossible.

    The first bin holds the exact zeros of ReLU and padding. Zero belongs to every format and says
    nothing about the range, so that bin takes the count of its neighbour.

    Reference: Migacz, 8-bit inference with TensorRT (GTC 2017). For integer formats the runs are
    its equal runs. The first bin is treated as in NVIDIA pytorch-quantization.
    """
    values = _non_negative_values(format, histogram)
    if values is None:
        return largest(histogram, format)
    bins = histogram.counts.shape[1]
    candidates = torch.arange(values.numel(), bins + 1, device=values.device)
    starts = torch.cat([values, 2 * values[-1:] - values[-2:-1]])
    scores = [
        divergences(histogram.counts.double(), part, starts)
        for part in candidates.split(max(1, _RUNS_TOGETHER // values.numel()))
    ]
    return _limit_to_data(
        _best_edge(torch.cat(scores, 1), candidates, histogram), histogram
    )


def divergences(counts: Tensor, candidates: Tensor, starts: Tensor) -> Tensor:
    """Return the divergence of each candidate edge, (groups, candidates).

    ``starts`` is where the runs start, and the end of the last, in units of the format.
    """
    bins = counts.shape[1]
    border = torch.outer(candidates.double(), starts).div_(starts[-1]).ceil_().long()
    # Most runs belong to many candidates. Numbering the distinct runs takes each logarithm once.
    keys = border[:, :-1] * (bins + 1) + border[:, 1:]
    if bins < 1 << 15:
        keys = keys.int()  # A narrower type is sorted faster.
    runs, run_indices = torch.unique(keys, return_inverse=True)
    begin = runs // (bins + 1)
    end = runs % (bins + 1)
    scores = [
        _divergence(part.t(), begin, end, run_indices, candidates)
        for part in counts.split(_GROUPS_TOGETHER)
    ]
    return torch.cat(scores)


def _divergence(
    counts: Tensor, begin: Tensor, end: Tensor, run_indices: Tensor, candidates: Tensor
) -> Tensor:
    """Return the divergence of each candidate, (groups, candidates); NaN without any data.

    ``counts`` is (bins, groups); ``begin`` and ``end`` are the bins of each distinct run, and
    ``run_indices`` is (candidates, runs of a candidate): its runs in order. With counts p of the
    reference and q of the quantized distribution, the sum of ``p * log(p / q)`` is split into
    sums over bins and over runs, which all candidates share.
    """
    counts = torch.cat([counts[1:2], counts[1:]])
    total = _exclusive_sum(counts)
    occupied = _exclusive_sum((counts > 0).double())
    in_run = total[end] - total[begin]
    mean = in_run / (occupied[end] - occupied[begin]).clamp_(min=1)
    mean_log = torch.log(mean).nan_to_num_(neginf=0.0)
    # p * log(q), summed over the runs of each candidate.
    weighted_log = in_run.mul_(mean_log)
    quantized = torch.nn.functional.embedding_bag(run_indices, weighted_log, mode="sum")
    # p * log(p), where the last bin also has all counts beyond the edge.
    beyond = total[-1] - total[candidates]
    last = counts[candidates - 1]
    reference = (
        _exclusive_sum(torch.xlogy(counts, counts))[candidates]
        - torch.xlogy(last, last)
        + torch.xlogy(last + beyond, last + beyond)
    )
    quantized_beyond = beyond * mean_log[run_indices[:, -1]]
    normalization = torch.log(total[-1] / total[candidates])
    divergence = (reference - quantized - quantized_beyond) / total[-1] - normalization
    return torch.where((last == 0) & (beyond > 0), torch.inf, divergence).t()


def _non_negative_values(format: Format, histogram: Histogram) -> Tensor | None:
    """Return the values >= 0 of the format as float64; None if the bins are too coarse."""
    values = [value for value in format.values if value >= 0]
    if len(values) >= histogram.counts.shape[1]:
        return None
    return torch.tensor(values, dtype=torch.float64, device=histogram.counts.device)


def _best_edge(scores: Tensor, candidates: Tensor, histogram: Histogram) -> Tensor:
    """Return each group's largest candidate of least score; infinity without one in its data."""
    counts = histogram.counts
    edges = torch.arange(1, counts.shape[1] + 1, device=counts.device)
    last_edge = torch.where(counts > 0, edges, 0).amax(1, keepdim=True)
    is_within = candidates <= last_edge
    score = torch.where(is_within, scores, torch.inf)
    score = score.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    is_best = score <= score.amin(1, keepdim=True) + _TIE
    best = torch.where(is_best, candidates, 0).amax(1)
    return torch.where(is_within.any(1), best.float() * histogram.width, torch.inf)


def _limit_to_data(amax: Tensor, histogram: Histogram) -> Tensor:
    """Return ``amax``, at most the largest magnitude seen, in the shape of an amax."""
    return torch.minimum(amax, histogram.amax).reshape(histogram.shape)


def _exclusive_sum(values: Tensor) -> Tensor:
    """Return (bins + 1, groups): the sum of all values before each index."""
    return torch.nn.functional.pad(values.cumsum(0), (0, 0, 1, 0))


# Powers below the one that holds the largest magnitude.
_POWERS = 8


def least_error_power_of_two(histogram: Histogram, format: Format) -> Tensor:
    """Return the range whose power-of-two scale has the least squared error.

    Of scales with equal errors the largest is chosen. The first bin is left out.
    """
    counts = histogram.counts[:, 1:].double()
    centers = _centers(histogram)
    largest = histogram.amax.double()
    top = torch.exp2(torch.ceil(torch.log2((largest / format.qmax).clamp(min=1e-300))))

    def error(amax: Tensor, scale: Tensor) -> Tensor:
        scale = scale.unsqueeze(1)
        error = format.snap_(centers / scale).mul_(scale).sub_(centers).square_()
        return (error * counts).sum(1)

    scales = [top / 2**exponent for exponent in range(_POWERS)]
    tried = [(torch.minimum(scale * format.qmax, largest), scale) for scale in scales]
    amax, _ = least_error(tried, error)
    return amax.float().reshape(histogram.shape)


def least_error_range(
    upper: Histogram, lower: Histogram, format: Format, scale_format: Format | None
) -> Range:
    """Return the asymmetric range of least squared error of the bin centers.

    The first bins are left out: their values round to 0, or nearly so, in every range.
    """
    centers = torch.cat([-_centers(lower), _centers(upper)], 1)
    counts = torch.cat([lower.counts[:, 1:], upper.counts[:, 1:]], 1).double()

    def error(amin: Tensor, amax: Tensor) -> Tensor:
        return total_error(centers, counts, amin, amax, format, scale_format)

    amin, amax = minimize_range(-lower.amax, upper.amax, error)
    return Range(amax.view(upper.shape), amin.view(lower.shape))


def _centers(histogram: Histogram) -> Tensor:
    """Return the centers of all bins but the first, (groups, bins - 1) float64."""
    bins = histogram.counts.shape[1]
    device = histogram.width.device
    index = torch.arange(1, bins, dtype=torch.float64, device=device)
    return (index + 0.5) * histogram.width.double().unsqueeze(1)


def entropy_range(
    upper: Histogram, lower: Histogram, format: Format, scale_format: Format | None
) -> Range:
    """Return the :func:`entropy` of the magnitudes, on each side at most its largest value."""
    width = torch.maximum(upper.width, lower.width)
    upper_counts = _with_width(upper, width)
    lower_counts = _with_width(lower, width)
    counts = upper_counts + lower_counts
    # Each side counts the values of the other one as zeros.
    counts[:, 0] = torch.minimum(upper_counts[:, 0], lower_counts[:, 0])
    magnitudes = Histogram(
        counts, width, torch.maximum(upper.amax, lower.amax), upper.shape
    )
    threshold = entropy(magnitudes, integer_format(max(2, format.bits)))
    high = torch.minimum(threshold, upper.amax.view(upper.shape))
    low = torch.minimum(threshold, lower.amax.view(lower.shape))
    return Range(high, -low)


def _with_width(histogram: Histogram, width: Tensor) -> Tensor:
    """Return the counts in bins of ``width``, a power of two times that of the histogram."""
    halvings = torch.log2(width / histogram.width).round().long()
    return merge_bins(histogram.counts, halvings)
