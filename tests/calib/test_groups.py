"""Views and reductions by group, against gathering each group's elements by index."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from torchq.calib.groups import group_view, magnitude, pieces
from torchq.formats import Granularity, PerAxis, PerBlock, PerTensor

GRANULARITIES: list[Granularity] = [
    PerTensor(),
    *(PerAxis(axes) for n in (1, 2, 3) for axes in itertools.combinations(range(3), n)),
    PerBlock(2, 0),
    PerBlock(3, 1),
    PerBlock(4, 2),
]
LAYOUTS = [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)]


def groups_of(x: Tensor, granularity: Granularity) -> dict[int, list[float]]:
    """The elements of each group, by walking over all indices."""
    shape = granularity.amax_shape(x.shape)
    found: dict[int, list[float]] = {}
    for index in itertools.product(*map(range, x.shape)):
        if isinstance(granularity, PerBlock):
            place = [i // granularity.size if d == granularity.axis else i for d, i in enumerate(index)]
        else:
            place = [i if shape[d] > 1 else 0 for d, i in enumerate(index)] if shape else []
        number = 0
        for i, size in zip(place, shape, strict=True):
            number = number * size + i
        found.setdefault(number, []).append(x[index].item())
    return found


@pytest.fixture(params=LAYOUTS, ids=str)
def x(request: pytest.FixtureRequest) -> Tensor:
    """(4, 6, 5) with distinct values, in every order of memory."""
    order = request.param
    inverse = [order.index(d) for d in range(3)]
    return (torch.arange(120.0).view(4, 6, 5) - 40).permute(order).contiguous().permute(inverse)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_groups_come_in_the_order_of_the_amax(x: Tensor, granularity: Granularity) -> None:
    parts = group_view(x, granularity)
    for number, values in groups_of(x, granularity).items():
        mine = parts[:, number].flatten().tolist()
        padding = [0.0] * (len(mine) - len(values))
        assert sorted(mine) == sorted(values + padding)


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis((0,)), PerAxis((1,)), PerAxis((2,))], ids=str)
def test_one_axis_is_never_copied(x: Tensor, granularity: Granularity) -> None:
    assert group_view(x, granularity).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("signed", [True, False])
def test_magnitude_is_the_largest_that_the_format_can_represent(x: Tensor, granularity: Granularity, signed: bool) -> None:
    amax, finite = magnitude(group_view(x, granularity), signed=signed)
    assert finite
    for number, values in groups_of(x, granularity).items():
        assert amax[number].item() == max(abs(v) if signed else max(v, 0.0) for v in values)


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis((1,))], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("signed", [True, False])
def test_magnitude_of_non_finite_data_is_zero(granularity: Granularity, value: float, signed: bool) -> None:
    x = torch.ones(4, 6, 5)
    x[1, 2, 3] = value
    amax, finite = magnitude(group_view(x, granularity), signed=signed)
    assert not finite
    assert amax.count_nonzero() == 0


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
