"""Views of a tensor with the elements of one amax side by side, and pieces of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from torchq.formats.granularity import Granularity

__all__ = ["group_view", "pieces"]


def group_view(x: Tensor, granularity: Granularity) -> Tensor:
    """Return ``x`` as ``(before, groups, after)``, a view wherever the memory layout allows one.

    Groups are numbered in the order of the flattened amax. Elements inside a group come in memory
    order, so a channels-last tensor is not copied.

    Args:
        x: any shape.
        granularity: the groups of elements; blocks are padded with zeros.
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

    Args:
        x: (before, groups, after).
        size: about the number of elements of a part.
        groups: at most the number of groups of a part.
    """
    after = min(x.shape[2], size)
    width = max(1, min(x.shape[1], groups, size // after))
    before = max(1, size // (after * width))
    for first in range(0, x.shape[1], width):
        where = slice(first, min(first + width, x.shape[1]))
        for rows in x[:, where].split(before, 0):
            for part in rows.split(after, 2):
                yield part, where
