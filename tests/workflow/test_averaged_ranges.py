"""Ranges that are averaged over samples: where outputs get nearer to float, nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.workflow import added_operators, averaged_ranges
from torchq.workflow.runs import Comparison

SIZE = 16


class Net(nn.Module):
    """Two layers, of which the first has a channel that a few samples excite much.

    The head reads nothing of that channel with ``reads`` 0, and it alone with a large one.
    """

    def __init__(self, reads: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.body = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
            self.body.weight[0] = 0
            self.body.weight[:, 0] = 0
            self.body.weight[0, 0] = 1.0
            self.head.weight[:, 0] = reads

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def samples(seed: int, count: int = 256) -> Tensor:
    """Return rows of which each 64th has one very large number."""
    x = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = x[:, 0].abs()
    x[::64, 0] = 300.0
    return x


def quantized(reads: float, **options: Any) -> Any:
    model = Net(reads).eval()
    # Weights of 7 bits: products of 8 overflow on CPUs without VNNI.
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, example=samples(1)[:2], progress=False, **options)
    # What the first layer reads is not in question.
    model.body.input_quantizer.mode = "off"
    return model


def calibrated(
    model: nn.Module, batches: Iterable[object] | None = None, **options: Any
) -> torchq.CalibrationReport:
    if batches is None:
        batches = [samples(seed) for seed in (3, 4)]
    return torchq.calibrate(model, batches, progress=False, **options)


@torch.no_grad()
def noise(model: Any, reads: float) -> float:
    """Return the noise over the signal on samples that calibration did not see."""
    x = samples(9)
    exact = Net(reads).eval()(x)
    return float((model(x) - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino"])
def test_ranges_are_averaged_where_the_outputs_are_nearer_to_float(
    target: str | None,
) -> None:
    whole, model = quantized(0.0, target=target), quantized(0.0, target=target)
    calibrated(whole, correct=False)
    report = calibrated(model)
    assert "head.input_quantizer" in report.averages.averaged
    assert noise(model, 0.0) < noise(whole, 0.0) / 2
    assert report.averages.outputs.gain > 3
    assert "averaged over samples: output " in str(report)


def test_the_range_is_the_mean_of_what_each_sample_reaches() -> None:
    model = quantized(0.0)
    batches = [samples(3), samples(4, 128)]
    calibrated(model, batches)
    with torch.no_grad():
        values = Net(0.0).body(torch.cat(batches)).relu()
    expected = values.amax(1).double().mean().float()
    # Batched products may differ in the last bits from those of another batch size.
    torch.testing.assert_close(
        model.head.input_quantizer.amax, expected, rtol=1e-5, atol=0
    )


def test_ranges_stay_whole_where_the_large_values_matter() -> None:
    model, whole = quantized(8.0), quantized(8.0)
    report = calibrated(model)
    calibrated(whole, correct=False)
    assert not report.averages.averaged and not report.averages.line
    assert torch.equal(model.head.input_quantizer.amax, whole.head.input_quantizer.amax)


def test_worse_outputs_bring_the_whole_ranges_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, whole = quantized(8.0), quantized(8.0)
    monkeypatch.setattr(averaged_ranges, "_NOTICED", 0.0)
    report = calibrated(model)
    calibrated(whole, correct=False)
    assert report.averages.tried and report.averages.outputs.is_worse
    assert not report.averages.averaged
    assert torch.equal(model.head.input_quantizer.amax, whole.head.input_quantizer.amax)


@pytest.mark.parametrize(("sizes", "tried"), [((3, 4), 0), ((3, 5), 1)])
def test_the_average_of_fewer_than_eight_samples_is_not_tried(
    sizes: tuple[int, int], tried: int
) -> None:
    batches = [samples(seed, size) for seed, size in zip((3, 4), sizes, strict=True)]
    assert calibrated(quantized(0.0), batches).averages.tried == tried


@pytest.mark.parametrize(
    ("names", "text"),
    [(("a",), "1 range is averaged"), (("a", "b"), "2 ranges are averaged"), ((), "")],
)
def test_the_line_counts_the_ranges(names: tuple[str, ...], text: str) -> None:
    line = averaged_ranges.RangeChoice(names).line
    assert line.startswith(text) and bool(line) == bool(names)


@pytest.mark.parametrize(
    "options", [{"method": "max"}, {"method": "mse"}, {"correct": False}]
)
def test_a_method_that_is_given_stays(options: dict[str, Any]) -> None:
    report = calibrated(quantized(0.0), **options)
    assert report.averages.outputs == Comparison()


def test_a_second_calibration_finds_the_same() -> None:
    model = quantized(0.0)
    first = calibrated(model)
    before = model.head.input_quantizer.amax.clone()
    second = calibrated(model, force=True)
    assert first.averages == second.averages
    assert torch.equal(model.head.input_quantizer.amax, before)


def test_an_interrupt_brings_the_ranges_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(0.0)
    calibrated(model)
    before = model.head.input_quantizer.amax.clone()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(averaged_ranges, "compared", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, force=True)
    assert torch.equal(model.head.input_quantizer.amax, before)


@pytest.mark.parametrize(("reads", "runs_more"), [(0.0, True), (8.0, False)])
def test_a_handful_of_samples_drops_ranges_and_keeps_none(
    reads: float, runs_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    of_all = added_operators.FewSamples.of_all

    def noted(few: added_operators.FewSamples) -> Any:
        seen.append("more")
        return of_all(few)

    monkeypatch.setattr(added_operators.FewSamples, "of_all", noted)
    # What is looked at is the gain, so no noise is too small.
    monkeypatch.setattr(averaged_ranges, "_NOTICED", 0.0)
    report = calibrated(quantized(reads))
    assert report.averages.tried and bool(report.averages.averaged) == runs_more
    assert bool(seen) == runs_more


def test_what_a_handful_does_not_show_keeps_the_whole_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The large values, which the head reads, are not in the first samples of a batch."""
    monkeypatch.setattr(averaged_ranges, "_NOTICED", 0.0)
    batches = [samples(seed).roll(10, 0) for seed in (3, 4)]
    report = calibrated(quantized(8.0), batches)
    assert report.averages.tried and report.averages.outputs.is_worse
    assert not report.averages.averaged
