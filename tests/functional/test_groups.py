"""Views by group, against gathering each group's elements by index."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.functional.group_cases import GRANULARITIES, LAYOUTS, groups_of, in_order
from torchq.formats import Granularity, PerAxis, PerTensor
from torchq.functional.kernels import group_view, pieces


@pytest.fixture(params=LAYOUTS, ids=str)
def x(request: pytest.FixtureRequest) -> Tensor:
    return in_order(request.param)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_groups_come_in_the_order_of_the_amax(x: Tensor, granularity: Granularity) -> None:
    parts = group_view(x, granularity)
    for number, values in groups_of(x, granularity).items():
        mine = parts[:, number].flatten().tolist()
        padding = [0.0] * (len(mine) - len(values))
        assert sorted(mine) == sorted(values + padding)


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis((0,)), PerAxis((1,)), PerAxis((2,))], ids=str
)
def test_one_axis_is_never_copied(x: Tensor, granularity: Granularity) -> None:
    assert group_view(x, granularity).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("size", [1, 7, 20, 1000])
@pytest.mark.parametrize("groups", [1, 4, 100])
def test_pieces_cover_everything_once(size: int, groups: int) -> None:
    x = torch.arange(5 * 9 * 13).view(5, 9, 13)
    seen = torch.zeros(9, 5 * 9 * 13, dtype=torch.int64)
    for part, where in pieces(x, size=size, groups=groups):
        assert part.numel() <= max(size, 1)
        assert part.shape[1] == where.stop - where.start <= groups
        for row, values in zip(range(where.start, where.stop), part.unbind(1), strict=True):
            seen[row] += torch.bincount(values.flatten(), minlength=seen.shape[1])
    expected = torch.zeros_like(seen)
    for row in range(9):
        expected[row, x[:, row].flatten()] = 1
    assert torch.equal(seen, expected)
