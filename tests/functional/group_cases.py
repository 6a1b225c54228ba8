"""Granularities, and the elements of each group found by walking over all indices."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from tests.contracts.quantize_contract import group_of
from torchq.formats import Granularity, PerAxis, PerBlock, PerTensor

GRANULARITIES: list[Granularity] = [
    PerTensor(),
    *(PerAxis(axes) for n in (1, 2, 3) for axes in itertools.combinations(range(3), n)),
    PerBlock(2, 0),
    PerBlock(3, 1),
    PerBlock(4, 2),
]


def groups_of(x: Tensor, granularity: Granularity) -> dict[int, list[float]]:
    """The elements of each group, by walking over all indices."""
    numbers = torch.arange(math.prod(granularity.amax_shape(x.shape)))
    numbers = numbers.view(granularity.amax_shape(x.shape))
    found: dict[int, list[float]] = {}
    for index in itertools.product(*map(range, x.shape)):
        number = int(numbers[group_of(index, granularity)])
        found.setdefault(number, []).append(x[index].item())
    return found


LAYOUTS = [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)]


def in_order(order: tuple[int, int, int]) -> Tensor:
    """(4, 6, 5) with distinct values, whose dimensions lie in memory in this order."""
    inverse = [order.index(d) for d in range(3)]
    return (torch.arange(120.0).view(4, 6, 5) - 40).permute(order).contiguous().permute(inverse)
