"""Ranges of tensors at hand against the definition, and views by group against indexing."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.contracts.quantize_contract import group_of
from torchq.formats import Granularity, PerAxis, PerBlock, PerTensor
from torchq.functional import compute_dtype, reduce_amax
from torchq.functional.kernels import tiled, use_backend
from torchq.functional.kernels.views import group_view

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
    actual: dict[int, list[float]] = {}
    for index in itertools.product(*map(range, x.shape)):
        number = int(numbers[group_of(index, granularity)])
        actual.setdefault(number, []).append(x[index].item())
    return actual


LAYOUTS = [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)]


def in_order(order: tuple[int, int, int]) -> Tensor:
    """(4, 6, 5) with distinct values, whose dimensions lie in memory in this order."""
    inverse = [order.index(d) for d in range(3)]
    return (
        (torch.arange(120.0).view(4, 6, 5) - 40)
        .permute(order)
        .contiguous()
        .permute(inverse)
    )


@pytest.fixture(params=LAYOUTS, ids=str)
def x(request: pytest.FixtureRequest) -> Tensor:
    return in_order(request.param)


@pytest.fixture(
    params=[2**18, 7],
    ids=["one-piece", "tiny-pieces"],
)
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so few elements in a piece that every case needs many."""
    monkeypatch.setattr(tiled, "_TILE", request.param)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_reduce_amax_equals_the_definition(
    x: Tensor, granularity: Granularity, dtype: torch.dtype
) -> None:
    for data in (
        x.to(dtype),
        (x * -1e-9).to(dtype),
        torch.full_like(x, -0.0, dtype=dtype),
        x.to(dtype)[:1].expand(4, 6, 5),
        x.to(dtype)[:, ::2, 1:],
    ):
        amax = reduce_amax(data, granularity)
        with use_backend("reference"):
            expected = reduce_amax(data, granularity)
        assert amax.dtype is expected.dtype
        assert torch.equal(amax, expected)
        assert not amax.signbit().any()


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_infinity_poison_their_group_alone(
    granularity: Granularity, dtype: torch.dtype, value: float
) -> None:
    x = torch.ones(4, 6, 5, dtype=dtype)
    x[2, 3, 1] = value
    place = torch.zeros(4, 6, 5)
    place[2, 3, 1] = 1.0
    expected = torch.where(
        granularity.amax(place) > 0,
        abs(value),
        1.0,
    )
    torch.testing.assert_close(
        reduce_amax(x, granularity),
        expected.to(compute_dtype(dtype)),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_empty_and_single_values() -> None:
    assert reduce_amax(torch.empty(0, 3), PerAxis((1,))).tolist() == [[0.0, 0.0, 0.0]]
    assert reduce_amax(torch.empty(2, 0), PerBlock(2, 1)).shape == (2, 0)
    assert reduce_amax(torch.tensor(-3.0)).tolist() == 3.0


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_groups_come_in_the_order_of_the_amax(
    x: Tensor, granularity: Granularity
) -> None:
    parts = group_view(x, granularity)
    for number, values in groups_of(x, granularity).items():
        mine = parts[:, number].flatten().tolist()
        padding = [0.0] * (len(mine) - len(values))
        assert sorted(mine) == sorted(values + padding)
