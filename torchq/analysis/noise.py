"""Sums that tell how far values are from what they should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; infinity without noise, NaN where a sum is not finite.

    Example:
        >>> decibels(100.0, 1.0)
        20.0
    """
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def mean_ratio(sums: Sequence[tuple[float, float]]) -> float:
    """Return the ratio in dB for the mean share of noise of several tensors.

    Args:
        sums: for each tensor the powers of signal and noise; those without signal do not count.

    Returns:
        The ratio; NaN without any signal, and where a sum is not finite.

    Example:
        >>> mean_ratio([(100.0, 1.0), (50.0, 0.5)])
        20.0
    """
    if not all(math.isfinite(power) for pair in sums for power in pair):
        return math.nan
    shares = [noise / signal for signal, noise in sums if signal > 0]
    return decibels(1.0, sum(shares) / len(shares)) if shares else math.nan


def relative_error(sqnr: float) -> float:
    """Return the size of an error beside the signal, from a ratio in dB: 1 is as large.

    Example:
        >>> relative_error(20.0)
        0.1
    """
    return math.nan if math.isnan(sqnr) else float(10 ** (-sqnr / 20))


def _largest(*values: float) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


@dataclass
class Noise:
    """Sums over pairs of tensors, of which one is the reference.

    Attributes:
        signal: sum of the squares of the reference.
        noise: sum of the squares of the differences.
        correlation: sum of the products of reference and difference.
        largest: the largest difference.
    """

    signal: float = 0.0
    noise: float = 0.0
    correlation: float = 0.0
    largest: float = 0.0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add one pair of equal shape; an empty pair adds nothing."""
        if value.numel() == 0 or value.shape != reference.shape:
            return
        wide = torch.float64 if reference.dtype is torch.float64 else torch.float32
        expected = reference.detach().to(wide).reshape(-1)
        error = value.detach().to(wide).reshape(-1) - expected
        self.signal += float(torch.dot(expected, expected))
        self.noise += float(torch.dot(error, error))
        self.correlation += float(torch.dot(expected, error))
        low, high = torch.aminmax(error)
        self.largest = _largest(self.largest, -float(low), float(high))

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in dB."""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between all values and all references; 1 where both are 0.

        NaN where a sum is not finite.
        """
        power = self.signal + 2 * self.correlation + self.noise
        if not math.isfinite(power):
            return math.nan
        if self.signal <= 0 or power <= 0:
            return 1.0 if self.signal == power else 0.0
        cosine = (self.signal + self.correlation) / math.sqrt(self.signal * power)
        return min(1.0, max(-1.0, cosine))
