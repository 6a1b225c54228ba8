"""Statistics of several processes as those of one; without a group everything stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group", "all_largest", "all_rows", "all_sums", "rank_in"]

Group = dist.ProcessGroup | None


def rank_in(group: Group) -> int:
    """Return the number of this process in ``group``; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def all_sums(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return the sum of each tensor over the processes of ``group``."""
    if group is None:
        return list(tensors)
    found = [tensor.clone() for tensor in tensors]
    for tensor in found:
        dist.all_reduce(tensor, group=group)
    return found


def all_largest(tensor: Tensor, group: Group) -> Tensor:
    """Return the largest value of each element over the processes of ``group``."""
    if group is None:
        return tensor
    found = tensor.clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def all_rows(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensors of all processes one after the other, in the order of their ranks."""
    if group is None:
        return tensor
    count = torch.tensor([len(tensor)], device=tensor.device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    sizes = [int(size) for size in counts]
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
