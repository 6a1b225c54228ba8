"""Views and reductions that put the elements of one amax together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchq.formats import Granularity

__all__ = ["group_view", "magnitude", "pieces", "whole"]


def whole(x: Tensor) -> Tensor:
    """``x``, or the full tensor of a DTensor (a collective of its mesh): the ranges of a shard are not those of the tensor."""
    # By its method, because importing torch.distributed.tensor takes longer than importing torchq.
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def group_view(x: Tensor, granularity: Granularity) -> Tensor:
    """``x`` as ``(before, groups, after)``, a view wherever the memory layout allows one.

    Groups are numbered in the order of the flattened amax. Elements inside a group come in memory order, so a channels-last
    tensor is not copied.

    Args:
        x: any shape.
        granularity: which elements form a group; blocks are padded with zeros.
    """
    x = granularity.split(x)
    reduced = granularity.reduce_dims(x.dim())
    kept = [d for d in range(x.dim()) if d not in reduced]
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    first = order.index(kept[0]) if kept else 0
    if order[first : first + len(kept)] != kept:
        order, first = [*kept, *reduced], 0
    sizes = [x.shape[d] for d in order]
    after = first + len(kept)
    return x.permute(order).reshape(math.prod(sizes[:first]), math.prod(sizes[first:after]), math.prod(sizes[after:]))


def magnitude(parts: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of every group that the format can represent, and whether all values are finite.

    An unsigned format turns negative values into 0, so there only the positive side counts.

    Args:
        parts: a :func:`group_view`, floating point, at least one element.
        signed: False ignores negative values.

    Returns:
        ``(amax, finite)``: float32 of (groups,), all 0 where a NaN or an infinity is among the values, and a 0-d bool. Both on
        the data's device, computed without a host sync.
    """
    if parts.shape[1] == 1:
        low, high = (side.view(1) for side in torch.aminmax(parts))
    else:
        low, high = _reduced(parts, torch.amin), _reduced(parts, torch.amax)
    low, high = low.float(), high.float()
    finite = torch.isfinite(low).all() & torch.isfinite(high).all()
    amax = torch.maximum(high, -low) if signed else high.clamp(min=0)
    return torch.where(finite, amax, 0.0), finite


def _reduced(parts: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """(groups,). One dimension after the other: both at once are several times slower on the CPU."""
    for dim in (2, 0):
        if parts.shape[dim] > 1:
            parts = reduce(parts, dim, keepdim=True)
    return parts.reshape(-1)


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
