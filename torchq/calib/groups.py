"""What observers and searches read from a tensor before anything else."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.functional.kernels import extremes, largest_magnitude

__all__ = ["magnitude", "whole"]


def whole(x: Tensor) -> Tensor:
    """``x``, or the full tensor of a DTensor (a collective of its mesh): the ranges of a shard are not those of the tensor."""
    # By its method, because importing torch.distributed.tensor takes longer than importing torchq.
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def magnitude(parts: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of every group that the format can represent, and whether all values are finite.

    An unsigned format turns negative values into 0, so there only the positive side counts.

    Args:
        parts: a :func:`~torchq.functional.kernels.group_view`, floating point, at least one element.
        signed: False ignores negative values.

    Returns:
        ``(amax, finite)``: float32 of (groups,), all 0 where a NaN or an infinity is among the values, and a 0-d bool. Both on
        the data's device, computed without a host sync.
    """
    if signed:
        amax = largest_magnitude(parts).float()
        finite = torch.isfinite(amax).all()
    else:
        low, high = (side.float() for side in extremes(parts))
        finite = torch.isfinite(low).all() & torch.isfinite(high).all()
        amax = high.clamp(min=0)
    return torch.where(finite, amax, 0.0), finite
