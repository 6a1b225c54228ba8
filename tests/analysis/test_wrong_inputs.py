"""What all functions of the analysis answer to arguments that cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.errors import CalibrationError, ConfigError

MEASURES: dict[str, Callable[..., Any]] = {
    "layer_errors": torchq.layer_errors,
    "sensitivity": torchq.sensitivity,
    "fisher": lambda *args, **options: torchq.sensitivity(*args, "fisher", **options),
    "doctor": torchq.doctor,
    "report": torchq.report,
}
measures = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


def quantized() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [torch.randn(8, 4)], progress=False)
    return model


@measures
def test_no_batch(measure: Callable[..., Any]) -> None:
    with pytest.raises(CalibrationError, match="got no batch; expected at least one"):
        measure(quantized(), [], progress=False)


@measures
def test_one_batch_in_the_place_of_several(measure: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"got a Tensor as batches; .* Pass \[batch\]"):
        measure(quantized(), torch.randn(8, 4), progress=False)


@measures
@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_batches_below_one(measure: Callable[..., Any], number: int) -> None:
    with pytest.raises(ConfigError, match=f"num_batches={number}; expected an integer of at least"):
        measure(quantized(), [torch.randn(8, 4)], num_batches=number, progress=False)


@measures
def test_a_float_model(measure: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no quantizer.* expected a quantized model"):
        measure(nn.Sequential(nn.Linear(4, 3)), [torch.randn(8, 4)], progress=False)


@measures
def test_batches_that_can_be_read_only_once(measure: Callable[..., Any]) -> None:
    batches = [torch.randn(8, 4) for _ in range(3)]
    model = quantized()
    once, often = measure(model, iter(batches), progress=False), measure(model, batches)
    assert str(once) == str(often)


def test_formats_and_metrics_that_do_not_exist(tmp_path: Path) -> None:
    batches = [torch.randn(8, 4)]
    with pytest.raises(CalibrationError, match="mixed_precision: got no batch"):
        torchq.mixed_precision(quantized(), [], budget={"mean_bits": 5})
    with pytest.raises(ConfigError, match=r"got suffix '\.pdf'"):
        torchq.report(quantized(), batches, tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="mixed_precision: got no formats"):
        torchq.mixed_precision(quantized(), batches, budget={"mean_bits": 5}, formats=[])
    with pytest.raises(ConfigError, match="mixed_precision: got no formats"):
        torchq.mixed_precision(quantized(), batches, budget={"mean_bits": 5}, formats=["float"])
    with pytest.raises(ConfigError, match=r"sensitivity: got metric 'acc'; expected .*'fisher'"):
        torchq.sensitivity(quantized(), batches, "acc", progress=False)
    with pytest.raises(ConfigError, match=r"report: got metric 'sqnr'; expected a function"):
        torchq.report(quantized(), batches, None, "sqnr", progress=False)


def test_a_folder_that_does_not_exist_is_found_before_the_work(tmp_path: Path) -> None:
    def never(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("the model ran")

    with pytest.raises(ConfigError, match=r"the folder .*nowhere does not exist\. Create it"):
        torchq.report(quantized(), [1], tmp_path / "nowhere" / "r.json", forward=never)
