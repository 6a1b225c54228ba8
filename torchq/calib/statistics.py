"""What observers and searches read from a tensor before anything else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchq.functional.kernels import largest_magnitude

__all__ = ["magnitude", "on_host", "whole"]


def whole(x: Tensor) -> Tensor:
    """``x``, or the full tensor of a DTensor (a collective of its mesh): the ranges of a shard are not those of the tensor."""
    # By its method, because importing torch.distributed.tensor takes longer than importing torchq.
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def on_host(x: Tensor) -> bool:
    """Whether looking at a value costs nothing. Elsewhere the host would wait for the device."""
    return x.device.type == "cpu"


def magnitude(parts: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The largest magnitude of every group that the format can represent, whether all values are finite, and whether some are lost.

    An unsigned format turns negative values into 0, so there only the positive side counts.

    Args:
        parts: a :func:`~torchq.functional.kernels.group_view`, floating point, at least one element.
        signed: False ignores negative values.

    Returns:
        ``(amax, finite, negative)``: float32 of (groups,), all 0 where a NaN or an infinity is among the values; a 0-d bool; for unsigned
        formats a 0-d bool, whether there are negative values, else None. All on the data's device, computed without a host sync.
    """
    negative = None
    if signed and parts.device.type == "cpu":
        high = largest_magnitude(parts, (0, 2)).view(-1).float()
        finite = torch.isfinite(high).all()
    else:
        low, high = _extremes(parts)
        finite = torch.isfinite(low).all() & torch.isfinite(high).all()
        negative = None if signed else (low < 0).any()
        high = torch.maximum(high, -low) if signed else high.clamp(min=0)
    return torch.where(finite, high, 0.0), finite, negative


def _extremes(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each group, (groups,) float32."""
    if parts.shape[1] == 1:
        low, high = torch.aminmax(parts)
        return low.view(1).float(), high.view(1).float()
    return _reduced(parts, torch.amin), _reduced(parts, torch.amax)


def _reduced(parts: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """(groups,) float32. One dimension after the other: both at once are several times slower on the CPU."""
    for dim in (2, 0):
        if parts.shape[dim] > 1:
            parts = reduce(parts, dim, keepdim=True)
    return parts.reshape(-1).float()
