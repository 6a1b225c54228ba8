"""Shapes, crops and resizing as Caffe defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def whole_numbers(x: Tensor) -> Tensor:
    """Return indices as whole numbers."""
    return x.long()


def reshape(x: Tensor, shape: Sequence[int], axis: int, count: int) -> Tensor:
    """Return ``x`` with ``count`` sizes from ``axis`` on replaced by a shape.

    0 keeps a size, -1 is the rest; a count of -1 replaces all.
    """
    sizes = list(x.shape)
    start = axis if axis >= 0 else len(sizes) + axis + 1
    end = len(sizes) if count == -1 else start + count
    own = sizes[start:end]
    chosen = [own[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape([*sizes[:start], *chosen, *sizes[end:]])


def flatten(x: Tensor, start: int, end: int) -> Tensor:
    """Return ``x`` with the dimensions from ``start`` to ``end`` as one."""
    return torch.flatten(x, start, end)


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return ``x`` with its dimensions in an order; those that it leaves out come behind."""
    return x.permute([*order, *[axis for axis in range(x.dim()) if axis not in order]])


def slice_parts(x: Tensor, axis: int, points: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """Return parts of ``x`` between points along ``axis``, or ``count`` equal ones."""
    return torch.tensor_split(x, list(points) if points else count, axis)


def crop(x: Tensor, like: Tensor, axis: int, offsets: Sequence[int]) -> Tensor:
    """Return the part of ``x`` that has the sizes of ``like`` from ``axis`` on."""
    axes = range(axis % x.dim(), x.dim())
    starts = list(offsets) * len(axes) if len(offsets) == 1 else list(offsets) or [0] * len(axes)
    for place, start in zip(axes, starts, strict=True):
        x = x.narrow(place, start, like.shape[place])
    return x


def tile(x: Tensor, axis: int, count: int) -> Tensor:
    """Return ``x`` repeated along one axis."""
    repeats = [1] * x.dim()
    repeats[axis] = count
    return x.repeat(repeats)


def shuffle_channels(x: Tensor, groups: int) -> Tensor:
    """Return channels of groups interleaved."""
    return F.channel_shuffle(x, groups)


def interpolate(
    x: Tensor,
    like: Tensor | None,
    size: Sequence[int],
    factors: Sequence[int],
    pads: Sequence[int],
) -> Tensor:
    """Return images resized bilinearly, with their corners kept in place.

    Args:
        x: (N, C, H, W).
        like: gives the size, None for the other arguments.
        size: height and width, 0 where factors give it.
        factors: by which sizes less 1 are divided, then multiplied.
        pads: added to the sizes first, before and behind; they are not positive.
    """
    before, behind = pads
    height, width = (n + before + behind for n in x.shape[2:])
    x = F.pad(x, [before, behind, before, behind])
    shrink, zoom = factors
    if like is not None:
        new = list(like.shape[2:])
    elif all(size):
        new = list(size)
    else:
        new = [((n - 1) // shrink + 1) for n in (height, width)]
        new = [n + (n - 1) * (zoom - 1) for n in new]
    return F.interpolate(x, new, mode="bilinear", align_corners=True)
