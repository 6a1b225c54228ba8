"""Shapes, slices and look-ups as MXNet defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reshape(x: Tensor, codes: Sequence[int], reverse: bool) -> Tensor:
    """Return ``x`` in the shape that codes describe.

    A positive code is a size; 0 keeps a size, -1 is the rest, -2 keeps all remaining sizes, -3
    merges two, -4 splits one into the two sizes that follow, one of which may be -1.

    Args:
        x: of any shape.
        codes: one or more for each size of the result.
        reverse: match codes and sizes from the right.
    """
    sizes = list(x.shape)
    if not reverse:
        return x.reshape(_decoded(list(codes), sizes))
    return x.reshape(_decoded(list(codes)[::-1], sizes[::-1])[::-1])


def _decoded(codes: list[int], sizes: list[int]) -> list[int]:
    result: list[int] = []
    at, place = 0, 0
    while place < len(codes):
        code = codes[place]
        if code == -2:
            result += sizes[at:]
            at = len(sizes)
        elif code == -3:
            result.append(sizes[at] * sizes[at + 1])
            at += 2
        elif code == -4:
            left, right = codes[place + 1], codes[place + 2]
            left = sizes[at] // right if left == -1 else left
            result += [left, sizes[at] // left if right == -1 else right]
            at, place = at + 1, place + 2
        else:
            result.append(sizes[at] if code == 0 else code)
            at += 1
        place += 1
    return result


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` in the shape of ``like``."""
    return x.reshape(like.shape)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return ``x`` with its dimensions in the order ``axes``, reversed where there are none."""
    return x.permute(list(axes) or list(reversed(range(x.dim()))))


def slice_each(
    x: Tensor,
    begin: Sequence[int | None],
    end: Sequence[int | None],
    stride: Sequence[int | None],
) -> Tensor:
    """Return a slice of the first dimensions; a negative stride runs backwards."""
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        every = (stride[axis] if axis < len(stride) else None) or 1
        x = _sliced(x, axis, first, last, every)
    return x


def _sliced(x: Tensor, axis: int, first: int | None, last: int | None, every: int) -> Tensor:
    if every > 0:
        return x[(slice(None),) * axis + (slice(first, last, every),)]
    places = range(*slice(first, last, every).indices(x.shape[axis]))
    return x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))


def slice_axis(x: Tensor, axis: int, begin: int, end: int | None) -> Tensor:
    """Return a slice of one dimension."""
    return _sliced(x, axis % x.dim(), begin, end, 1)


def slice_like(x: Tensor, like: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the first part of ``x``, of the size of ``like`` along ``axes``, by default all."""
    for axis in [axis % x.dim() for axis in axes] or range(x.dim()):
        x = x.narrow(axis, 0, like.shape[axis])
    return x


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` broadcast to ``shape``, where 0 keeps a size."""
    return x.expand([own if size == 0 else size for own, size in zip(x.shape, shape, strict=True)])


def broadcast_axis(x: Tensor, axes: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return ``x`` repeated along axes of size 1."""
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return x.expand(shape)


def broadcast_like(
    x: Tensor, like: Tensor, axes: Sequence[int], like_axes: Sequence[int]
) -> Tensor:
    """Return ``x`` broadcast to the shape of ``like``, or to some of its sizes."""
    if not axes:
        return x.expand(like.shape)
    return broadcast_axis(x, axes, [like.shape[axis] for axis in like_axes])


def reverse(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return ``x`` with the elements along ``axes`` in reverse order."""
    return torch.flip(x, list(axes))


def rows(indices: Tensor, count: int) -> Tensor:
    """Return the rows of a table that indices of any type name; others name the first or last."""
    return indices.long().clamp(0, count - 1)


def take(x: Tensor, indices: Tensor, axis: int, wrap: bool) -> Tensor:
    """Return entries along ``axis``; indices outside are clipped, or counted around."""
    axis, size = axis % x.dim(), x.shape[axis]
    places = indices.long() % size if wrap else rows(indices, size)
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def pick(x: Tensor, indices: Tensor, axis: int, keepdims: bool, wrap: bool) -> Tensor:
    """Return one element of each line along ``axis``."""
    axis, size = axis % x.dim(), x.shape[axis]
    places = indices if indices.dim() == x.dim() else indices.unsqueeze(axis)
    places = places.long() % size if wrap else rows(places, size)
    found = torch.gather(x, axis, places)
    return found if keepdims else found.squeeze(axis)


def gather_nd(x: Tensor, indices: Tensor) -> Tensor:
    """Return the entries at positions that the first dimension of ``indices`` spells out."""
    return x[tuple(indices.long().unbind(0))]


def one_hot(indices: Tensor, depth: int, on: float, off: float, dtype: torch.dtype) -> Tensor:
    """Return ``on`` at the indices of a new last axis of ``depth``, ``off`` elsewhere."""
    classes = torch.arange(depth, device=indices.device)
    return torch.where(indices.long().unsqueeze(-1) == classes, on, off).to(dtype)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` where ``condition`` is not zero, else ``y``; a vector chooses whole rows."""
    chosen = condition != 0
    if chosen.dim() == 1 and x.dim() > 1:
        chosen = chosen.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(chosen, x, y)


def depth_to_space(x: Tensor, block: int) -> Tensor:
    """Return channels laid out as blocks of pixels; the channels of a block come first."""
    n, c, h, w = x.shape
    y = x.reshape(n, block, block, c // (block * block), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // (block * block), h * block, w * block)


def space_to_depth(x: Tensor, block: int) -> Tensor:
    """Return blocks of pixels laid out as channels; the places in a block come first."""
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * block * block, h // block, w // block)
