"""Estimators against naive loops over bins, on hand-made and random histograms."""

import math
from bisect import bisect_left, bisect_right

import pytest
import torch

from torchq.calib import Calibrator, estimators
from torchq.calib.estimators import entropy, largest, mse, percentile
from torchq.calib.histogram import Histogram
from torchq.formats import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    UINT4,
    UINT8,
    Format,
    PerAxis,
    format_by_name,
    integer_format,
)

FORMATS = [INT8, UINT8, INT4, UINT4, integer_format(3), E4M3, E2M1]


def histogram_of(counts: list[int], width: float = 1.0) -> Histogram:
    """Return a histogram whose largest magnitude is the upper edge of the last occupied bin."""
    last = max((i + 1 for i, c in enumerate(counts) if c), default=0)
    return Histogram(
        torch.tensor([counts]), torch.tensor([width]), torch.tensor([last * width])
    )


def random_counts(kind: str, bins: int, generator: torch.Generator) -> list[int]:
    centers = torch.arange(bins) + 0.5
    shape = {
        "normal": torch.exp(-0.5 * (centers / (bins / 5)) ** 2),
        "laplace": torch.exp(-centers / (bins / 12)),
        "uniform": torch.ones(bins),
        "zeros": torch.where(centers < 1, 1000.0, torch.exp(-centers / (bins / 8))),
        "sparse": torch.rand(bins, generator=generator) ** 40,
    }[kind]
    return torch.poisson(shape * 300, generator=generator).long().tolist()


def naive_entropy(counts: list[int], levels: list[float]) -> int:
    """Return the edge of least divergence, bin by bin as in Migacz's slides.

    A run starts at each of ``levels``; the last run is as long as the one before it.
    """
    counts = [counts[1], *counts[1:]]
    end = max(i + 1 for i, c in enumerate(counts) if c)
    top = 2 * levels[-1] - levels[-2]
    best = end
    least = math.inf
    for edge in range(len(levels), end + 1):
        reference = counts[:edge]
        reference[-1] += sum(counts[edge:])
        run_of = [bisect_right(levels, i * top / edge) - 1 for i in range(edge)]
        quantized = [0.0] * edge
        for run in set(run_of):
            members = [i for i in range(edge) if run_of[i] == run and counts[i]]
            for i in members:
                quantized[i] = sum(counts[m] for m in members) / len(members)
        if any(p and not q for p, q in zip(reference, quantized, strict=True)):
            continue
        p_sum = sum(reference)
        q_sum = sum(quantized)
        divergence = sum(
            p / p_sum * math.log((p / p_sum) / (q / q_sum))
            for p, q in zip(reference, quantized, strict=True)
            if p
        )
        if divergence <= least + 1e-12:
            best, least = edge, min(least, divergence)
    return best


def naive_mse(counts: list[int], format: Format) -> int:
    """Return the edge of least error of the bin centers, each rounded by a search."""
    grid = [v for v in format.values if v >= 0]
    end = max(i + 1 for i, c in enumerate(counts) if c)
    best = 0
    least = math.inf
    for edge in range(1, end + 1):
        scale = edge / format.qmax
        error = 0.0
        for i, count in enumerate(counts):
            if count:
                position = bisect_left(grid, (i + 0.5) / scale)
                near = grid[max(0, position - 1) : position + 1]
                error += count * min(abs(g * scale - (i + 0.5)) for g in near) ** 2
        if error <= least:
            best = edge
            least = error
    return best


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "zeros", "sparse"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_entropy_has_the_optimum_of_the_naive_loop(
    kind: str, format: Format, generator: torch.Generator
) -> None:
    counts = random_counts(kind, 150 if format.bits < 8 else 280, generator)
    levels = [v for v in format.values if v >= 0]
    assert (
        abs(
            entropy(histogram_of(counts), format).item() - naive_entropy(counts, levels)
        )
        <= 1
    )


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "zeros", "sparse"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_mse_has_the_optimum_of_the_naive_loop(
    kind: str, format: Format, generator: torch.Generator
) -> None:
    counts = random_counts(kind, 150 if format.bits < 8 else 280, generator)
    assert (
        abs(mse(histogram_of(counts), format).item() - naive_mse(counts, format)) <= 1
    )


@pytest.mark.parametrize("percent", [0.5, 37.0, 50.0, 99.0, 99.99, 100.0])
def test_percentile_is_within_a_bin_of_sorting(
    percent: float, generator: torch.Generator
) -> None:
    x = torch.randn(9973, generator=generator).abs()
    calibrator = Calibrator("entropy")
    calibrator.collect(x)
    rank = math.ceil(percent / 100 * x.numel())
    exact = x.sort().values[rank - 1].item()
    actual = calibrator.range("percentile", percentile=percent).high.item()
    assert abs(actual - exact) <= calibrator.histogram().width.item()


def test_percentile_interpolates_within_the_bin() -> None:
    histogram = histogram_of([10, 0, 10], width=0.5)
    values = [
        percentile(histogram, INT8, percentile=p).item()
        for p in (25.0, 50.0, 75.0, 100.0)
    ]
    assert values == [0.25, 0.5, 1.25, 1.5]


def test_largest_is_exact() -> None:
    calibrator = Calibrator("entropy")
    calibrator.collect(torch.tensor([0.1, -0.7]))
    assert torch.equal(
        largest(calibrator.histogram(), INT8),
        torch.tensor(0.7),
    )


@pytest.mark.parametrize("estimator", [percentile, mse, entropy, largest])
def test_no_count_at_all_gives_the_largest_magnitude(estimator: object) -> None:
    histogram = Histogram(
        torch.zeros(2, 512, dtype=torch.int64),
        torch.ones(2),
        torch.tensor([0.0, 3.0]),
        (2, 1),
    )
    assert callable(estimator)
    assert torch.equal(
        estimator(histogram, INT8),
        torch.tensor([[0.0], [3.0]]),
    )


@pytest.mark.parametrize("estimator", [mse, entropy])
def test_a_grid_finer_than_the_bins_keeps_everything(estimator: object) -> None:
    assert callable(estimator)
    assert (
        estimator(histogram_of([5, 4, 3, 2] * 64), format_by_name("int16")).item()
        == 256.0
    )


@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_groups_and_candidates_may_be_cut_anywhere(
    method: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    calibrator = Calibrator(method, granularity=PerAxis((1,)), num_bins=256)
    calibrator.collect(
        torch.randn(50, 9, generator=generator) * torch.logspace(-2, 3, 9)
    )
    whole = calibrator.range().high
    monkeypatch.setattr(estimators, "_CANDIDATES_TOGETHER", 7)
    monkeypatch.setattr(estimators, "_GROUPS_TOGETHER", 2)
    monkeypatch.setattr(estimators, "_RUNS_TOGETHER", 1000)
    assert torch.equal(calibrator.range().high, whole)


def test_as_many_values_as_bins_keep_everything() -> None:
    # 16 bins and the 16 values of uint4: every bin has a value, so nothing is gained by a smaller
    # range, and no edge is tried.
    counts = [10**6] + [0] * 14 + [1]
    histogram = Histogram(
        torch.tensor([counts]), torch.tensor([1.0]), torch.tensor([15.5])
    )
    assert mse(histogram, UINT4).item() == 15.5
    assert entropy(histogram, UINT4).item() == 15.5


def test_as_many_bins_as_values_are_too_coarse() -> None:
    counts = random_counts("laplace", 128, torch.Generator().manual_seed(0))
    coarse = histogram_of(counts)
    fine = histogram_of([*counts, 0])
    assert torch.equal(mse(coarse, INT8), largest(coarse, INT8))
    assert not torch.equal(mse(fine, INT8), largest(fine, INT8))
