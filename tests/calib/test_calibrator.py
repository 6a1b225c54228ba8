"""Calibrators beyond the contract: the moving average's formula, blocks, options, the registry."""

import re
from pathlib import Path

import pytest
import torch

from torchq.calib import (
    ESTIMATORS,
    OBSERVERS,
    Calibrator,
    Histogram,
    Observer,
    methods,
)
from torchq.errors import ConfigError
from torchq.formats import INT8, Format, PerBlock, PerTensor


@pytest.mark.parametrize("axis", [1, -1])
def test_max_per_block(axis: int, generator: torch.Generator) -> None:
    x = torch.randn(4, 70, generator=generator)
    calibrator = Calibrator(granularity=PerBlock(32, axis))
    calibrator.collect(x)
    assert torch.equal(
        calibrator.range().high,
        torch.stack([x[:, i : i + 32].abs().amax(1) for i in (0, 32, 64)], dim=1),
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_moving_average_follows_the_recurrence(
    momentum: float, generator: torch.Generator
) -> None:
    calibrator = Calibrator("moving_average", momentum=momentum)
    expected = None
    for batch in torch.randn(400, 30, generator=generator):
        calibrator.collect(batch)
        largest = batch.abs().max().item()
        expected = (
            largest
            if expected is None
            else momentum * expected + (1 - momentum) * largest
        )
        # The batches beyond the window weigh 2**-25 together; one rounding to float32 adds 2**-24.
        assert calibrator.range().high.item() == pytest.approx(
            expected, rel=2**-23, abs=0
        )


def test_moving_average_memory_is_bounded() -> None:
    calibrator = Calibrator("moving_average")
    for value in range(1000):
        calibrator.collect(torch.tensor([float(value)]))
    assert calibrator.batches == 1000
    assert len(calibrator.observers[0].recent) == calibrator.observers[0].window == 165


def test_max_calibrator_has_one_method() -> None:
    calibrator = Calibrator()
    calibrator.collect(torch.ones(3))
    assert calibrator.range("max").high.item() == 1.0
    message = r"got method='entropy' with options \{\}; expected method='max' without options\."
    with pytest.raises(ConfigError, match=message):
        calibrator.range("entropy")


def test_options_given_when_made_are_defaults(generator: torch.Generator) -> None:
    x = torch.randn(1000, generator=generator)
    calibrator = Calibrator(
        "percentile",
        format=INT8,
        granularity=PerTensor(),
        percentile=50.0,
        num_bins=512,
    )
    plain = Calibrator("histogram", num_bins=512)
    for c in (calibrator, plain):
        c.collect(x)
    assert torch.equal(
        calibrator.range().high, plain.range("percentile", percentile=50.0).high
    )
    assert torch.equal(
        calibrator.range(percentile=90.0).high,
        plain.range("percentile", percentile=90.0).high,
    )
    assert torch.equal(
        calibrator.range("mse").high,
        plain.range("mse").high,
    )
    assert torch.equal(
        plain.range().high,
        plain.range("entropy").high,
    )


def test_registry_lists_refuses_and_takes() -> None:
    assert methods()[:3] == ("max", "moving_average", "histogram")
    assert set(methods()) == {*OBSERVERS, *ESTIMATORS}
    message = "unknown calibration method 'kl'; expected one of: max, moving_average, histogram, "
    with pytest.raises(ConfigError, match=message):
        Calibrator("kl", format=INT8, granularity=PerTensor())
    message = r"calibration method 'max': got options \['percentile'\]"
    with pytest.raises(ConfigError, match=message):
        Calibrator("max", format=INT8, granularity=PerTensor(), percentile=99.0)
    message = (
        r"calibration method 'entropy': got options \['percentile'\]; expected none"
    )
    with pytest.raises(ConfigError, match=message):
        Calibrator("entropy", format=INT8, granularity=PerTensor(), percentile=99.0)
    with pytest.raises(ConfigError, match="registered already"):
        OBSERVERS.add("max", Observer)


def test_an_estimator_that_is_added_is_a_method() -> None:
    def half(
        histogram: Histogram, format: Format, *, factor: float = 0.5
    ) -> torch.Tensor:
        return (factor * histogram.amax).reshape(histogram.shape)

    ESTIMATORS.add("half", half)
    try:
        calibrator = Calibrator(
            "half", format=INT8, granularity=PerTensor(), factor=0.25
        )
        calibrator.collect(torch.tensor([1.0, -8.0]))
        assert "half" in methods()
        assert calibrator.range().high.item() == 2.0
        assert calibrator.range(factor=0.5).high.item() == 4.0
    finally:
        ESTIMATORS.remove("half")


def test_every_method_is_described() -> None:
    """The other tests of documents run the code of docs/calibration.md."""
    page = Path(__file__).resolve().parents[2] / "docs" / "calibration.md"
    table = page.read_text(encoding="utf-8").partition("\n## Corrected")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert {*rows, "histogram"} == {*methods()}
