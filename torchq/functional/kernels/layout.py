"""How a tensor lies in memory, and which of its dimensions an amax keeps."""

from __future__ import annotations

from torch import Tensor

__all__ = ["memory_order", "merged_dims"]


def memory_order(x: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor, outermost in memory first: ``(0, 2, 3, 1)`` for channels_last."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))


def merged_dims(x: Tensor, amax: Tensor) -> tuple[list[int], list[bool]]:
    """Sizes of x in memory order with neighbours merged, and whether amax keeps each: the flags alternate.

    Dimensions of size 1 are left out. ``amax`` has no dimension, or as many as x with sizes of 1 where it is shared.
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
