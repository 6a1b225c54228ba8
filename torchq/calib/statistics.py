"""Statistics of one tensor that observers and searches start from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchq.functional.kernels import largest_magnitude

__all__ = ["gather_full_tensor", "is_on_host", "magnitude"]


def gather_full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor as it is.

    The range of a shard is not the range of the tensor. Gathering is a collective of the
    DTensor's mesh, so every rank of the mesh must call this function.
    """
    # The method is looked up because importing torch.distributed.tensor takes longer than
    # importing torchq.
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def is_on_host(x: Tensor) -> bool:
    """Return True if reading a value of ``x`` does not wait for a device."""
    return x.device.type == "cpu"


def magnitude(
    parts: Tensor, *, signed: bool, find_negative: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the largest magnitude of every group, and what a format would lose.

    An unsigned format turns negative values into 0, so only positive values count for it.

    Args:
        parts: a :func:`~torchq.functional.kernels.group_view` (before, groups, after), floating
            point, with at least one element.
        signed: False ignores negative values.
        find_negative: look for negative values, also if ``signed``.

    Returns:
        ``(amax, finite, negative)`` on the device of the data, computed without waiting for it.

        * amax: (groups,) float32; all 0 if any value is NaN or infinite.
        * finite: 0-d bool, True if no value is NaN or infinite.
        * negative: 0-d bool, True if any value is negative; None if nobody looked for one.
    """
    negative = None
    find_negative = find_negative or not signed
    if is_on_host(parts) and not find_negative:
        largest = largest_magnitude(parts, (0, 2)).view(-1).float()
        finite = torch.isfinite(largest).all()
    else:
        smallest, largest = _extremes(parts)
        finite = torch.isfinite(smallest).all() & torch.isfinite(largest).all()
        if find_negative:
            negative = (smallest < 0).any()
        largest = torch.maximum(largest, -smallest) if signed else largest.clamp(min=0)
    return torch.where(finite, largest, 0.0), finite, negative


def _extremes(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each group, (groups,) float32 each."""
    if parts.shape[1] == 1:
        smallest, largest = torch.aminmax(parts)
        return smallest.view(1).float(), largest.view(1).float()
    return _reduce(parts, torch.amin), _reduce(parts, torch.amax)


def _reduce(parts: Tensor, reduction: Callable[..., Tensor]) -> Tensor:
    """Reduce all dimensions but the groups; return (groups,) float32."""
    # Reducing one dimension at a time is several times faster on the CPU than both at once.
    for dim in (2, 0):
        if parts.shape[dim] > 1:
            parts = reduction(parts, dim, keepdim=True)
    return parts.reshape(-1).float()
