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
    kept = [d for d in range(x.dim()) if d not in reduced]
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    first = order.index(kept[0]) if kept else 0
    if order[first : first + len(kept)] != kept:
        order, first = [*kept, *reduced], 0
    sizes = [x.shape[d] for d in order]
    after = first + len(kept)
    return x.permute(order).reshape(
        math.prod(sizes[:first]), math.prod(sizes[first:after]), math.prod(sizes[after:])
    )


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
    kept: list[bool] = []
    for d in memory_order(x):
        size = x.shape[d]
        if size == 1:
            continue
        keep = amax.dim() > 0 and amax.shape[d] != 1
        if kept and kept[-1] == keep:
            sizes[-1] *= size
        else:
            sizes.append(size)
            kept.append(keep)
    return sizes, kept
