"""Elementwise functions with ONNX's rules for integers, signs and saturation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``; integers are rounded toward zero."""
    if a.is_floating_point():
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


def remainder(a: Tensor, b: Tensor, fmod: bool) -> Tensor:
    """Return the remainder with the sign of ``b``, or of ``a`` where ``fmod`` is set."""
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def power(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a ** b`` in the element type of ``a``."""
    if a.is_floating_point() and not b.is_floating_point():
        return torch.pow(a, b.to(a.dtype))
    return torch.pow(a, b).to(a.dtype)


def maximum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elementwise maximum of tensors that broadcast."""
    return reduce(torch.maximum, tensors)


def minimum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elementwise minimum of tensors that broadcast."""
    return reduce(torch.minimum, tensors)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elementwise sum of tensors that broadcast."""
    return reduce(torch.add, tensors)


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elementwise mean of tensors that broadcast."""
    return total(tensors) / len(tensors)


def clip(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """Return ``min(max(x, low), high)``; the upper bound wins where the bounds cross."""
    if low is not None:
        x = torch.maximum(x, low.to(x.dtype))
    return x if high is None else torch.minimum(x, high.to(x.dtype))


def choose(flag: bool, first: int, second: int) -> int:
    """Return the first number if the flag is set, else the second."""
    return first if flag else second


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """Return ``x`` where it is not negative, else ``slope * x``.

    The slope broadcasts from the right.
    """
    return torch.where(x < 0, slope * x, x)


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Return ``clamp(alpha * x + beta, 0, 1)``."""
    return (x * alpha + beta).clamp(0, 1)


def cast_float8(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Return ``x`` as FP8 numbers, rounded to nearest even.

    Values that round beyond the largest number become that number where ``saturate`` is set. Else
    they become infinity in E5M2, and NaN in the formats without infinity (ONNX operator Cast, table
    of FP8 conversions).
    """
    x = x.to(torch.float32)
    largest = torch.finfo(dtype).max
    fits = torch.where(x.isnan(), x, x.clamp(-largest, largest))
    if saturate:
        return fits.to(dtype)
    # Half a step beyond the largest number, the tie included where its last bit is odd.
    code = torch.tensor(largest).to(dtype).view(torch.uint8)
    limit = largest + float(largest - (code - 1).view(dtype).float()) / 2
    beyond = (x.abs() >= limit) if bool(code & 1) else (x.abs() > limit)
    replaced = x.sign() * torch.inf if dtype is torch.float8_e5m2 else torch.full_like(x, torch.nan)
    return torch.where(beyond, replaced, fits).to(dtype)
