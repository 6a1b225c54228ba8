"""Pooling and resizing as MXNet defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.frontends.building.pooling import root


def global_pool(x: Tensor, kind: str, p: int) -> Tensor:
    """Return the maximum, mean, sum or p-norm of each channel; its dimensions are kept as 1."""
    axes = list(range(2, x.dim()))
    if kind == "max":
        return torch.amax(x, axes, keepdim=True)
    if kind == "avg":
        return torch.mean(x, axes, keepdim=True)
    if kind == "sum":
        return torch.sum(x, axes, keepdim=True)
    return root(torch.sum(x**p, axes, keepdim=True), p)


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
