"""The histogram against counting with exact fractions, for any division into batches."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from torchq.calib import Calibrator
from torchq.calib.histogram import (
    MAX_COUNTS,
    MIN_EXPONENT,
    HistogramObserver,
    count_on_cpu_,
    count_on_device_,
    power_of_two,
)
from torchq.errors import ConfigError
from torchq.formats import PerAxis, PerBlock, PerTensor


def observed(*batches: Tensor, **options: object) -> HistogramObserver:
    observer = HistogramObserver(options.pop("granularity", PerTensor()), **options)
    for batch in batches:
        observer.observe(batch)
    return observer


def exact_histogram(values: list[float], bins: int) -> tuple[int, list[int]]:
    """Return (exponent, counts) by the definition, in rational arithmetic."""
    top = max((Fraction(abs(v)) for v in values), default=Fraction(0))
    exponent = MIN_EXPONENT
    while top >= bins * Fraction(2) ** exponent:
        exponent += 1
    counts = [0] * bins
    for value in values:
        counts[math.floor(Fraction(abs(value)) / Fraction(2) ** exponent)] += 1
    return exponent, counts


def same(a: HistogramObserver, b: HistogramObserver) -> bool:
    return (
        torch.equal(a.counts, b.counts)
        and torch.equal(a.exponent, b.exponent)
        and torch.equal(a.amax, b.amax)
    )


@pytest.mark.parametrize("bins", [16, 100, 2048])
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 0.01, 1.0, 300.0, 1e37])
def test_counts_equal_the_definition(
    bins: int, scale: float, generator: torch.Generator
) -> None:
    x = torch.cat(
        [
            torch.randn(500, generator=generator) * scale,
            torch.tensor([0.0, -0.0, scale, 2 * scale, -4 * scale]),
        ]
    )
    observer = observed(x, num_bins=bins)
    exponent, counts = exact_histogram(x.tolist(), bins)
    assert observer.exponent.tolist() == [exponent]
    assert observer.counts.tolist() == [counts]
    assert observer.amax.item() == x.abs().max().item()


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis((1,))])
def test_any_split_and_order_gives_the_same_histogram(
    granularity: PerTensor | PerAxis, generator: torch.Generator
) -> None:
    # 10000 values in 100 rows of rising range: the width doubles over and over.
    x = torch.randn(100, 4, 25, generator=generator) * torch.logspace(-6, 5, 100).view(
        -1, 1, 1
    )
    whole = observed(x, granularity=granularity)
    for batches in (
        x.split(15),
        x.split(1),
        x.flip(0).split(1),
        x[torch.randperm(100, generator=generator)].split(9),
    ):
        assert same(observed(*batches, granularity=granularity), whole)
    assert whole.counts.sum().item() == x.numel()


def test_counts_are_exact_beyond_float32() -> None:
    # 2**24 + 1 is the first count that a float32 histogram loses.
    chunk = torch.full((2**22,), 0.5)
    observer = observed(*[chunk] * 5, torch.tensor([0.5]))
    assert observer.counts.max().item() == 5 * 2**22 + 1
    assert observer.counts.dtype is torch.int64


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis((0,)), PerAxis((1,)), PerAxis((0, 2))]
)
@pytest.mark.parametrize("signed", [True, False])
def test_the_device_path_counts_like_the_cpu_path(
    granularity: PerTensor | PerAxis, signed: bool, generator: torch.Generator
) -> None:
    x = torch.randn(5, 3, 700, generator=generator).mul(4).round().div(4)
    observer = observed(x, granularity=granularity, signed=signed, num_bins=64)
    kept = [d for d in range(3) if d not in granularity.reduce_dims(3)]
    grouped = x.permute(*kept, *(d for d in range(3) if d not in kept)).reshape(
        1, observer.counts.shape[0], -1
    )
    scale = power_of_two(-observer.exponent)
    for count in (
        count_on_device_,
        lambda c, x, s, finite, *rest: count_on_cpu_(c, x, s, *rest),
    ):
        counts = torch.zeros_like(observer.counts)
        count(counts, grouped, scale, torch.tensor(True), signed)
        assert torch.equal(counts, observer.counts)


def test_the_device_path_adds_nothing_for_non_finite_data() -> None:
    counts = torch.zeros(1, 64, dtype=torch.int64)
    x = torch.tensor([0.0, 1.0, float("nan"), float("inf"), -float("inf")]).view(
        1, 1, -1
    )
    count_on_device_(
        counts,
        x,
        torch.ones(1),
        torch.tensor(False),
        True,
    )
    assert counts.count_nonzero() == 0


def test_large_and_strided_tensors_are_counted_whole(
    generator: torch.Generator,
) -> None:
    # More than one piece in every direction, and views that are not dense.
    x = torch.randn(3, 70, 3000, generator=generator)
    for view in (x, x.transpose(0, 2), x[:, ::2, 1:], x[:, :1].expand(3, 70, 3000)):
        for axis in (None, 0, 1, 2):
            granularity = PerTensor() if axis is None else PerAxis((axis,))
            observer = observed(view, granularity=granularity, num_bins=128)
            rows = (
                view.reshape(1, -1)
                if axis is None
                else view.movedim(axis, 0).reshape(view.shape[axis], -1)
            )
            index = (rows.abs() / power_of_two(observer.exponent).view(-1, 1)).long()
            index += torch.arange(len(rows)).view(-1, 1) * 128
            assert torch.equal(
                observer.counts,
                torch.bincount(index.flatten(), minlength=128 * len(rows)).view(
                    -1, 128
                ),
            )


def test_memory_is_bounded() -> None:
    observer = observed(
        torch.ones(1, 5000),
        granularity=PerAxis((1,)),
    )
    assert observer.counts.shape == (5000, 512)
    assert observer.counts.numel() <= MAX_COUNTS
    message = (
        r"got 40000 groups; expected at most 32768 with 128 bins\. Use method='max'"
    )
    with pytest.raises(ConfigError, match=message):
        observed(
            torch.ones(1, 40000),
            granularity=PerAxis((1,)),
        )


def test_edges_are_multiples_of_the_width() -> None:
    calibrator = Calibrator("histogram", num_bins=16)
    calibrator.collect(torch.tensor([3.0, 0.1]))
    histogram = calibrator.histogram()
    assert histogram.edges.tolist() == [[i / 4 for i in range(17)]]
    assert histogram.counts[0, 12].item() == 1


@pytest.mark.parametrize("num_bins", [15, 65537, 2**40, 64.0, True, "2048", None])
def test_blocks_and_other_numbers_of_bins_are_errors(num_bins: Any) -> None:
    message = (
        r"got PerBlock\(size=32, axis=-1\); expected one amax per tensor .* also 'mse'"
    )
    with pytest.raises(ConfigError, match=message):
        HistogramObserver(PerBlock(32))
    with pytest.raises(
        ConfigError, match=r"num_bins: got .*; expected an integer, at least 16"
    ):
        Calibrator("histogram", num_bins=num_bins)
    assert Calibrator("histogram", num_bins=65536).observers[0].num_bins == 65536
