"""The elements of one amax, side by side: a view, pieces of it, and its largest magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchq.formats.granularity import Granularity

__all__ = ["extremes", "group_view", "largest_magnitude", "pieces"]

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
# Elements in a piece for each thread: what is written for it stays in the second-level cache.
_PIECE = 1 << 18


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


def largest_magnitude(parts: Tensor) -> Tensor:
    """The largest magnitude of every group of a :func:`group_view` with at least one element, no host sync.

    Returns:
        (groups,) in the dtype of ``parts``; NaN where one is among the values, never a negative zero.
    """
    if parts.shape[1] > 1 and parts.device.type == "cpu" and parts.dtype in _BITS:
        return _largest_bits(parts)
    low, high = extremes(parts)
    return torch.maximum(low.abs(), high.abs())


def _largest_bits(parts: Tensor) -> Tensor:
    """Without the sign, floats are ordered as the integers of the same bits, NaN last, and torch reduces integers faster."""
    dtype, integer = parts.dtype, _BITS[parts.dtype]
    parts, size = parts.view(integer), min(_PIECE * torch.get_num_threads(), parts.numel())
    scratch, largest = torch.empty(size, dtype=integer), torch.zeros(parts.shape[1], dtype=integer)
    for part, where in pieces(parts, size=size, groups=parts.shape[1]):
        magnitude = torch.bitwise_and(part, torch.iinfo(integer).max, out=scratch[: part.numel()].view(part.shape))
        torch.maximum(largest[where], _reduced(magnitude, torch.amax, (0, 2)), out=largest[where])
    return largest.view(dtype)


def extremes(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of every group of a :func:`group_view`, (groups,); NaN where one is among the values."""
    if parts.shape[1] == 1:
        low, high = torch.aminmax(parts)
        return low.view(1), high.view(1)
    return _reduced(parts, torch.amin, (2, 0)), _reduced(parts, torch.amax, (2, 0))


def _reduced(parts: Tensor, reduce: Callable[..., Tensor], dims: tuple[int, int]) -> Tensor:
    """(groups,). One dimension after the other: both at once are several times slower on the CPU."""
    for dim in dims:
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
