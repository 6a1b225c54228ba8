"""Granularities: shapes, reductions, the way back, and the shapes of amax that they accept."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.contracts.quantize_contract import group_of
from torchq.errors import ConfigError
from torchq.formats import Granularity, PerAxis, PerBlock, PerTensor

TABLE: list[tuple[Granularity, tuple[int, ...], tuple[int, ...]]] = [
    (PerTensor(), (2, 3, 4), ()),
    (PerTensor(), (), ()),
    (PerAxis((0,)), (8, 3, 5, 5), (8, 1, 1, 1)),
    (PerAxis((1,)), (8, 3, 5, 5), (1, 3, 1, 1)),
    (PerAxis((-1,)), (8, 3), (1, 3)),
    (PerAxis((0, 1)), (8, 3, 5, 5), (8, 3, 1, 1)),
    (PerAxis((0, -1)), (2, 3, 4), (2, 1, 4)),
    (PerAxis((0,)), (7,), (7,)),
    (PerAxis((0,)), (0, 3), (0, 1)),
    (PerBlock(32), (4, 64), (4, 2)),
    (PerBlock(32), (4, 65), (4, 3)),
    (PerBlock(16, 0), (40, 3), (3, 3)),
    (PerBlock(4, 1), (2, 6, 5, 5), (2, 2, 5, 5)),
    (PerBlock(100), (3,), (1,)),
    (PerBlock(4), (3, 0), (3, 0)),
]
IDS = [f"{granularity}{list(shape)}" for granularity, shape, _ in TABLE]


def by_hand(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Return amax by a loop over every element."""
    out = torch.zeros(granularity.amax_shape(x.shape))
    for index in itertools.product(*map(range, x.shape)):
        group = group_of(index, granularity)
        out[group] = max(
            out[group].item(),
            abs(x[index].item()),
        )
    return out


@pytest.mark.parametrize(("granularity", "shape", "expected"), TABLE, ids=IDS)
def test_shape_and_amax(
    granularity: Granularity,
    shape: tuple[int, ...],
    expected: tuple[int, ...],
    generator: torch.Generator,
) -> None:
    x = torch.randn(shape, generator=generator)
    assert granularity.amax_shape(x.shape) == expected
    amax = granularity.amax(x)
    assert amax.shape == expected
    assert torch.equal(amax, by_hand(x, granularity))


@pytest.mark.parametrize(("granularity", "shape", "expected"), TABLE, ids=IDS)
def test_split_and_join_are_inverse(
    granularity: Granularity, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    x = torch.arange(float(math.prod(shape))).reshape(shape)
    assert torch.equal(granularity.join(granularity.split(x), x.shape), x)


@pytest.mark.parametrize(("granularity", "shape", "expected"), TABLE, ids=IDS)
def test_aligned_amax_broadcasts_to_its_group(
    granularity: Granularity, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Elements over the amax of their group are at most 1, and 1 once in every group."""
    x = torch.rand(shape) + 0.5
    ratio = granularity.split(x) / granularity.align(granularity.amax(x), x.shape)
    assert bool((granularity.join(ratio, x.shape) <= 1).all())
    assert int((ratio == 1).sum()) == math.prod(expected)


def test_amax_keeps_dtype_and_shows_nan(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [
            [1.0, -3.0],
            [math.nan, 2.0],
            [math.inf, 0.0],
        ],
        dtype=dtype,
        requires_grad=True,
    )
    amax = PerAxis((0,)).amax(x)
    assert amax.dtype is dtype
    assert not amax.requires_grad
    assert amax[0].item() == 3.0
    assert amax[1].isnan()
    assert amax[2].isinf()
    assert PerTensor().amax(x).isnan()


def test_legacy_amax_shapes() -> None:
    shape = torch.Size([5, 2, 3, 3])
    for amax in (
        torch.ones(()),
        torch.ones(1),
        torch.ones(1, 1, 1, 1),
    ):
        assert PerAxis((0,)).align(amax, shape).shape == ()
        assert PerTensor().align(amax, shape).shape == ()
    assert PerAxis((0,)).align(torch.ones(5), shape).shape == (5, 1, 1, 1)
    assert PerAxis((1,)).align(torch.ones(2), shape).shape == (1, 2, 1, 1)
    assert PerBlock(2).align(torch.ones(1), shape).shape == ()
    with pytest.raises(
        ConfigError, match=r"amax has shape \(1, 1\); expected \(4, 2\)"
    ):
        PerBlock(32).align(
            torch.ones(1, 1),
            torch.Size([4, 64]),
        )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: PerTensor().align(torch.ones(3), torch.Size([3])),
            r"amax has shape \(3,\); expected one value, per tensor",
        ),
        (
            lambda: PerAxis((0,)).align(torch.ones(4), torch.Size([5, 2])),
            r"amax has shape \(4,\); expected \(5, 1\) for axis \(0,\) of a tensor of shape",
        ),
        (
            lambda: PerAxis((0, 1)).align(torch.ones(5), torch.Size([5, 2])),
            r"amax has shape \(5,\); expected \(5, 2\)",
        ),
        (
            lambda: PerAxis((2,)).amax_shape((5, 2)),
            "axis 2: the tensor has 2 dimensions; expected -2 to 1",
        ),
        (lambda: PerAxis((0,)).amax_shape(()), "axis 0: the tensor has 0 dimensions"),
        (lambda: PerBlock(0), "block_size: got 0; expected at least 1"),
        (
            lambda: PerBlock(4, 2).amax_shape((5, 2)),
            "block axis 2: the tensor has 2 dimensions; expected -2 to 1",
        ),
        (
            lambda: PerBlock(4).align(torch.ones(5, 2), torch.Size([5, 4])),
            r"amax has shape \(5, 2\); expected \(5, 1\): blocks of 4 on axis -1",
        ),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


def test_granularities_are_values() -> None:
    assert PerAxis((0,)) == PerAxis((0,)) != PerAxis((1,))
    assert len({PerTensor(), PerTensor(), PerBlock(4), PerBlock(4)}) == 2
