"""pytorch-quantization's definitions of entropy, MSE and percentile.

Each function takes ``counts`` (bins,) and ``edges`` (bins + 1,) of equal bins from 0 on, and
returns one of the edges or bin centers. As in the original, the candidates start at ``start_bin``
for every format, and ranges are not interpolated. Two errors of the original are corrected:
reading does not change the histogram, and a candidate without data below it is no optimum.
:mod:`torchq.calib.estimators` has torchq's own definitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.compat.pytorch_quantization.descriptor import NumBits
from torchq.compat.pytorch_quantization.tensor_quant import fake_tensor_quant, scaled_e4m3
from torchq.errors import ConfigError

__all__ = ["entropy", "mse", "percentile"]

# Elements of one temporary.
_ELEMENTS = 1 << 22


def entropy(
    counts: Tensor,
    edges: Tensor,
    num_bits: NumBits,
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
) -> Tensor:
    """Return the edge with the least Kullback-Leibler divergence of the quantized histogram.

    Of edges with equal divergences the last is returned. The first bin takes the count of its
    neighbour, because zeros tell nothing about the range.

    Raises:
        ConfigError: a float format, or fewer than ``start_bin`` bins.
    """
    if not isinstance(num_bits, int) or num_bits == 0:
        raise ConfigError(
            f"entropy: got num_bits={num_bits}; expected an integer format. Use mse or percentile"
        )
    candidates = _candidates(counts.numel() + 1, start_bin, stride)
    counts = torch.cat([counts[1:2], counts[1:]]).to("cpu", torch.float64)
    divergence = torch.cat(
        [
            _divergence(counts, part, 1 << (num_bits - 1 + unsigned))
            for part in candidates.split(1024)
        ]
    )
    best = divergence.numel() - 1 - int(divergence.flip(0).argmin())
    return edges[int(candidates[best])]


def _divergence(counts: Tensor, candidates: Tensor, levels: int) -> Tensor:
    """Return the divergence for each number of bins kept.

    It is infinity if the last kept bin or all of them are empty.
    """
    below = _running(counts)
    border = -(-candidates.unsqueeze(1) * torch.arange(levels + 1) // levels)
    mass = below[border].diff(dim=1)
    occupied = _running((counts > 0).double())[border].diff(dim=1)
    log_mean = torch.where(mass > 0, torch.log(mass / occupied.clamp(min=1)), 0.0)
    last = counts[candidates - 1]
    kept, beyond = below[candidates], below[-1] - below[candidates]
    # The last run that holds the last kept bin is the last one that is not empty of bins.
    run = (border < candidates.unsqueeze(1)).sum(1) - 1
    q_last = log_mean.gather(1, run.unsqueeze(1)).squeeze(1)
    own = (
        _running(torch.xlogy(counts, counts))[candidates]
        - torch.xlogy(last, last)
        + torch.xlogy(last + beyond, last + beyond)
    )
    divergence = (own - (mass * log_mean).sum(1) - beyond * q_last) / below[-1] - torch.log(
        below[-1] / kept
    )
    impossible = ((last == 0) & (beyond > 0)) | (kept == 0)
    return torch.where(impossible, torch.inf, divergence)


def mse(
    counts: Tensor,
    edges: Tensor,
    num_bits: NumBits,
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
) -> Tensor:
    """Return the bin center that is the range with the least squared error of all centers.

    Of centers with equal errors the first is returned.

    Raises:
        ConfigError: not more than ``start_bin`` bins.
    """
    centers = ((edges[1:] + edges[:-1]) / 2).float()
    candidates = _candidates(counts.numel(), start_bin, stride).to(centers.device)
    occupied = counts > 0
    weights, values = counts[occupied].double(), centers[occupied].unsqueeze(0)
    errors = []
    for part in candidates.split(max(1, _ELEMENTS // weights.numel())):
        amax = centers[part].unsqueeze(1)
        if isinstance(num_bits, tuple):
            rounded = scaled_e4m3(values, amax, *num_bits)
        else:
            rounded = fake_tensor_quant(values, amax, num_bits, unsigned)
        errors.append((rounded - values).double().square() @ weights)
    return centers[candidates[torch.cat(errors).argmin()]]


def percentile(counts: Tensor, edges: Tensor, percentile: float) -> Tensor:
    """Return the lower edge of the bin where the share of the data reaches ``percentile`` %.

    Raises:
        ConfigError: outside 0 to 100.
    """
    if not 0 <= percentile <= 100:
        raise ConfigError(
            f"percentile: got {percentile}; expected a number in the range 0 to 100, such as 99.99"
        )
    share = (counts.to("cpu", torch.float64) / counts.sum().item()).cumsum(0)
    return edges[int(torch.searchsorted(share, percentile / 100))]


def _candidates(stop: int, start_bin: int, stride: int) -> Tensor:
    """Return the indices of the candidates."""
    if stop <= start_bin:
        raise ConfigError(
            f"start_bin: got {start_bin} for a histogram of {stop} candidates; expected fewer. "
            "Collect with more bins"
        )
    return torch.arange(start_bin, stop, stride)


def _running(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))
