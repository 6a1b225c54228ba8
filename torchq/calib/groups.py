"""Views and reductions that put the elements of one amax together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchq.formats import Granularity

__all__ = ["group_view", "magnitude", "pieces", "whole"]


def whole(x: Tensor) -> Tensor:
    """``x``, or the full tensor of a DTensor (a collective of its mesh): the ranges of a shard are not those of the tensor."""
    # By its method, because importing torch.distributed.tensor takes longer than importing torchq.
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def magnitude(x: Tensor, granularity: Granularity, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of every group that the format can represent, and whether ``x`` is finite.

    An unsigned format turns negative values into 0, so there only the positive side counts.

    Args:
        x: floating point, any shape with at least one element.
        granularity: which elements form a group.
        signed: False ignores negative values.

    Returns:
        ``(amax, finite)``: float32 of ``granularity.amax_shape(x.shape)``, all 0 where ``x`` holds a NaN or an infinity, and a
        0-d bool. Both on x's device, computed without a host sync.
    """
    parts = granularity.split(x)
    dims = granularity.reduce_dims(parts.dim())
    if len(dims) == parts.dim():
        low, high = torch.aminmax(parts)
    elif dims:
        low, high = parts.amin(dims), parts.amax(dims)
    else:
        low = high = parts
    low, high = low.float(), high.float()
    finite = torch.isfinite(low).all() & torch.isfinite(high).all()
    amax = torch.maximum(high, -low) if signed else high.clamp(min=0)
    return torch.where(finite, amax, 0.0).view(granularity.amax_shape(x.shape)), finite


def group_view(x: Tensor, kept: tuple[int, ...]) -> Tensor:
    """``x`` as ``(before, groups, after)``, a view wherever the memory layout allows one.

    Groups are numbered in the order of the flattened amax: the kept dimensions, ascending. Elements inside a group come in
    memory order, so a channels-last tensor is not copied.

    Args:
        x: any shape.
        kept: the non-negative dimensions that keep their own amax, ascending; ``()`` makes one group.
    """
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    at = [order.index(d) for d in kept]
    if at != list(range(at[0], at[0] + len(at))) if at else False:
        order = [*kept, *(d for d in order if d not in kept)]
        at = list(range(len(kept)))
    start, stop = (at[0], at[-1] + 1) if at else (0, 0)
    sizes = [x.shape[d] for d in order]
    before, groups, after = (_product(s) for s in (sizes[:start], sizes[start:stop], sizes[stop:]))
    return x.permute(order).reshape(before, groups, after)


def pieces(x: Tensor, *, size: int, groups: int) -> Iterator[tuple[Tensor, slice]]:
    """Cut a :func:`group_view` into parts of about ``size`` elements and at most ``groups`` groups, with the groups of each."""
    after = min(x.shape[2], size)
    width = max(1, min(x.shape[1], groups, size // after))
    before = max(1, size // (after * width))
    for first in range(0, x.shape[1], width):
        where = slice(first, min(first + width, x.shape[1]))
        for rows in x[:, where].split(before, 0):
            for part in rows.split(after, 2):
                yield part, where


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
