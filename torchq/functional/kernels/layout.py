"""The layout of a tensor in memory, and the dimensions that its amax keeps."""

from __future__ import annotations

from torch import Tensor

__all__ = ["memory_order", "merged_dims"]


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor, outermost in memory first.

    For channels_last these are ``(0, 2, 3, 1)``.
    """
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))


def merged_dims(x: Tensor, amax: Tensor) -> tuple[list[int], list[bool]]:
    """Return the sizes of ``x`` in memory order, neighbours merged, and whether amax keeps each.

    Dimensions of size 1 are left out. Neighbours of one kind are merged, so the flags alternate.

    Args:
        x: dense.
        amax: no dimension, or as many as ``x`` with sizes of 1 where it is shared.
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
