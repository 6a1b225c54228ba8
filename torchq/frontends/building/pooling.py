"""Pooling with the options of old frameworks that torch's modules do not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

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
    for axis, (k, s, side) in enumerate(zip(kernel, stride, pad, strict=True), start=2):
        size = x.shape[axis] + 2 * side
        room = size - k
        count = -(-room // s) if convention == "full" else room // s
        padded = [side, count * s + k - size + side, *padded]
    if kind == "max":
        wide = F.pad(x, padded, value=torch.finfo(x.dtype).min)
        return _MAX[len(kernel)](wide, list(kernel), list(stride))
    if kind == "lp":
        return root(_sums(F.pad(x**p, padded), kernel, stride), p)
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


def root(x: Tensor, p: int) -> Tensor:
    """Return the p-th root; odd ones keep the sign, as MXNet sums odd powers with their sign."""
    return x.sign() * x.abs() ** (1 / p)
