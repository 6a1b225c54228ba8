"""The range of least error where scales are powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.calib.histogram import Histogram
from torchq.formats import Format

__all__ = ["least_error_power_of_two"]

# Powers below the one that holds the largest magnitude.
_POWERS = 8


def least_error_power_of_two(histogram: Histogram, format: Format, power: float) -> Tensor:
    """Return the range whose power-of-two scale has the least ``sum(|error| ** power)``.

    Of scales with equal errors the largest is chosen. The first bin is left out: its values round
    to 0, or nearly so, with every scale.

    Args:
        histogram: the statistics.
        format: the number format.
        power: > 0.

    Returns:
        float32 of the histogram's shape, at most the largest magnitude; rounding its scale up gives
        the power of two that was chosen.
    """
    counts = histogram.counts[:, 1:].double()
    bins = torch.arange(1, histogram.counts.shape[1], dtype=torch.float64, device=counts.device)
    centers = (bins + 0.5) * histogram.width.double().unsqueeze(1)
    largest = histogram.amax.double()
    top = torch.exp2(torch.ceil(torch.log2((largest / format.qmax).clamp(min=1e-300))))
    best, least = largest, torch.full_like(largest, torch.inf)
    for exponent in range(_POWERS):
        scale = top.unsqueeze(1) / 2**exponent
        error = format.snap_(centers / scale).mul_(scale).sub_(centers).abs_().pow_(power)
        total = (error * counts).sum(1)
        amax = torch.minimum(scale.squeeze(1) * format.qmax, largest)
        best = torch.where(total < least, amax, best)
        least = torch.minimum(total, least)
    return best.float().reshape(histogram.shape)
