"""Arithmetic and norms as Caffe defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def above(x: Tensor, limit: float) -> Tensor:
    """Return 1 where ``x`` is above a limit, else 0."""
    return (x > limit).to(x.dtype)


def along(part: Tensor, ndim: int, axis: int) -> Tensor:
    """Return a tensor whose dimensions line up with those from ``axis`` on of a larger one."""
    axis = axis % ndim
    behind = ndim - axis - part.dim()
    return part.reshape((*part.shape, *[1] * behind))


def affine(x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int) -> Tensor:
    """Return ``x * scale + bias``, both lined up with the dimensions of ``x`` from ``axis`` on."""
    if scale is not None:
        x = x * along(scale, x.dim(), axis)
    return x if bias is None else x + along(bias, x.dim(), axis)


def weighted_sum(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of tensors, each times its factor."""
    total = tensors[0] * factors[0]
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        total = total + tensor * factor
    return total


def power(x: Tensor, power: float, scale: float, shift: float) -> Tensor:
    """Return ``(shift + scale * x) ** power``."""
    y = x if scale == 1 else x * scale
    y = y if shift == 0 else y + shift
    return y if power == 1 else y**power


def exponential(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """Return ``base ** (shift + scale * x)``; a base of -1 stands for e."""
    inner = shift + scale * x
    return torch.exp(inner) if base == -1 else torch.pow(base, inner)


def logarithm(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """Return the logarithm of ``shift + scale * x``; a base of -1 stands for e."""
    found = torch.log(shift + scale * x)
    return found if base == -1 else found / torch.log(torch.tensor(base)).to(found)


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return channels normalized by fixed statistics."""
    return F.batch_norm(x, mean, variance, eps=eps)


def mean_variance(x: Tensor, variance: bool, across: bool, eps: float) -> Tensor:
    """Return channels, or whole samples, with mean 0, and with variance 1 if asked for."""
    axes = list(range(1 if across else 2, x.dim()))
    y = x - x.mean(axes, keepdim=True)
    if not variance:
        return y
    return y / ((y * y).mean(axes, keepdim=True).sqrt() + eps)


def within_channel(x: Tensor, size: int, alpha: float, beta: float) -> Tensor:
    """Return ``x`` divided by a power of the mean square around each place."""
    squares = F.avg_pool2d(x * x, size, 1, (size - 1) // 2)
    return x * (1 + alpha * squares) ** -beta


def normalize(x: Tensor, scale: Tensor, across_spatial: bool, eps: float) -> Tensor:
    """Return ``x`` divided by its norm over each sample, or each place, then scaled."""
    axes = list(range(1, x.dim())) if across_spatial else [1]
    y = x / torch.sqrt((x * x).sum(axes, keepdim=True) + eps)
    return y * along(scale, x.dim(), 1)


def reduce(x: Tensor, kind: str, axis: int, factor: float) -> Tensor:
    """Return a sum over all dimensions from ``axis`` on, times a factor.

    Args:
        x: of any shape.
        kind: of the elements (``"SUM"``, ``"MEAN"``), their magnitudes (``"ASUM"``) or their
            squares (``"SUMSQ"``).
        axis: the first one that disappears.
        factor: of the result.
    """
    axes = list(range(axis % x.dim(), x.dim()))
    y = {"ASUM": x.abs(), "SUMSQ": x * x}.get(kind, x)
    return (y.mean(axes) if kind == "MEAN" else y.sum(axes)) * factor


def arg_max(x: Tensor, count: int, axis: int | None, values: bool) -> Tensor:
    """Return the places of the largest elements, or their values.

    Without an axis, the elements of each sample are one line, and places come before values.
    """
    if axis is not None:
        found, places = torch.topk(x, count, axis)
        return found if values else places.to(x.dtype)
    found, places = torch.topk(x.flatten(1), count, 1)
    places = places.to(x.dtype).unsqueeze(1)
    return torch.cat([places, found.unsqueeze(1)], 1) if values else places
