"""Pooling and resizing as MXNet defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["crop", "global_pool", "pool", "resize_bilinear"]

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def pool(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    convention: str,
    include_pad: bool,
    p: int,
) -> Tensor:
    """Return the maxima, means, sums or p-norms of windows.

    Args:
        x: (N, C, ...).
        kind: ``"max"``, ``"avg"``, ``"sum"`` or ``"lp"``.
        kernel: size of a window.
        stride: between windows.
        pad: on both sides.
        convention: how many windows there are: ``"valid"`` rounds down; ``"full"`` rounds up, also
            where the last window begins behind the padding.
        include_pad: means count the padding, but not what lies behind it.
        p: of the norm; an odd norm sums powers with their sign.
    """
    padded: list[int] = []
    counts: list[int] = []
    for axis, (k, s, side) in enumerate(zip(kernel, stride, pad, strict=True), start=2):
        size = x.shape[axis] + 2 * side
        room = size - k
        count = -(-room // s) if convention == "full" else room // s
        padded = [side, count * s + k - size + side, *padded]
        counts.append(count + 1)
    if kind == "max":
        wide = F.pad(x, padded, value=torch.finfo(x.dtype).min)
        return _MAX[len(kernel)](wide, list(kernel), list(stride))
    if kind == "lp":
        return _root(_sums(F.pad(x**p, padded), kernel, stride), p)
    sums = _sums(F.pad(x, padded), kernel, stride)
    if kind == "sum":
        return sums
    inside = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if include_pad:
        own = [side for amount in reversed(pad) for side in (amount, amount)]
        inside = F.pad(inside, own, value=1.0)
        padded = [extra - side for extra, side in zip(padded, own, strict=True)]
    return sums / _sums(F.pad(inside, padded), kernel, stride)


def _sums(x: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the sums of windows, a convolution of each channel with ones."""
    ones = torch.ones((1, 1, *kernel), dtype=x.dtype, device=x.device)
    planes = x.reshape(-1, 1, *x.shape[2:])
    sums = _CONV[len(kernel)](planes, ones, None, list(stride))
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def global_pool(x: Tensor, kind: str, p: int) -> Tensor:
    """Return the maximum, mean, sum or p-norm of each channel; its dimensions are kept as 1."""
    axes = list(range(2, x.dim()))
    if kind == "max":
        return torch.amax(x, axes, keepdim=True)
    if kind == "avg":
        return torch.mean(x, axes, keepdim=True)
    if kind == "sum":
        return torch.sum(x, axes, keepdim=True)
    return _root(torch.sum(x**p, axes, keepdim=True), p)


def _root(x: Tensor, p: int) -> Tensor:
    """Return the p-th root; odd ones keep the sign, as MXNet sums odd powers with their sign."""
    return x.sign() * x.abs() ** (1 / p)


def resize_bilinear(
    x: Tensor, height: int, width: int, scales: Sequence[float] | None, align_corners: bool
) -> Tensor:
    """Return images of ``height`` and ``width``, or scaled by ``scales``, rounded down."""
    if scales is not None:
        height, width = int(scales[0] * x.shape[2]), int(scales[1] * x.shape[3])
    return F.interpolate(x, (height, width), mode="bilinear", align_corners=align_corners)


def crop(
    x: Tensor, like: Tensor | None, size: Sequence[int], offset: Sequence[int], center: bool
) -> Tensor:
    """Return a window of images, of ``size`` or of the size of ``like``."""
    height, width = like.shape[2:] if like is not None else size
    top, left = offset
    if center:
        top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]
