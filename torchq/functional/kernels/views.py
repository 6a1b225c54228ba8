"""Views of a tensor by its layout in memory and by the groups that share an amax."""

import math
from collections.abc import Iterator

from torch import Tensor

from torchq.formats.granularity import Granularity


def group_view(x: Tensor, granularity: Granularity) -> Tensor:
    """Return ``x`` as ``(before, groups, after)``, a view wherever the memory layout allows one.

    Groups are numbered in the order of the flattened amax. Elements inside a group come in memory
    order, so a channels-last tensor is not copied. Blocks are padded with zeros.
    """
    x = granularity.split(x)
    reduced = granularity.reduce_dims(x.dim())
    group_dims = [d for d in range(x.dim()) if d not in reduced]
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    first = order.index(group_dims[0]) if group_dims else 0
    if order[first : first + len(group_dims)] != group_dims:
        # The dimensions of the groups do not lie side by side in memory: this one is a copy.
        order = [*group_dims, *reduced]
        first = 0
    sizes = [x.shape[d] for d in order]
    after = first + len(group_dims)
    before_size = math.prod(sizes[:first])
    groups = math.prod(sizes[first:after])
    after_size = math.prod(sizes[after:])
    return x.permute(order).reshape(before_size, groups, after_size)


def pieces(x: Tensor, *, size: int, groups: int) -> Iterator[tuple[Tensor, slice]]:
    """Yield the parts of a :func:`group_view`, each with the slice of its groups.

    A part has about ``size`` elements of at most ``groups`` groups.
    """
    after = min(x.shape[2], size)
    width = max(1, min(x.shape[1], groups, size // after))
    before = max(1, size // (after * width))
    for first in range(0, x.shape[1], width):
        where = slice(first, min(first + width, x.shape[1]))
        for rows in x[:, where].split(before, 0):
            for part in rows.split(after, 2):
                yield part, where


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor, outermost in memory first."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))


def merged_dims(x: Tensor, amax: Tensor) -> tuple[list[int], list[bool]]:
    """Return the sizes of ``x`` in memory order, neighbours merged, and whether amax keeps each.

    Dimensions of size 1 are left out. Neighbours of one kind are merged, so the flags alternate.
    ``x`` is dense; ``amax`` has no dimension, or as many with sizes of 1 where it is shared.
    """
    sizes: list[int] = []
    is_kept: list[bool] = []
    for d in memory_order(x):
        size = x.shape[d]
        if size == 1:
            continue
        keep = amax.dim() > 0 and amax.shape[d] != 1
        if is_kept and is_kept[-1] == keep:
            sizes[-1] *= size
        else:
            sizes.append(size)
            is_kept.append(keep)
    return sizes, is_kept
