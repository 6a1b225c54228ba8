"""Models and batches with NaN and infinity: the analysis says so, and names the layer."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import CalibrationError, ExportError


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def broken(place: str, value: float) -> tuple[Any, Tensor, str]:
    """Return a quantized network, a batch, and the layer that first returns ``value``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
    x = images()
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    tensors = {"weight": model[0].weight.data, "bias": model[3].bias.data, "input": x}
    tensors[place].view(-1)[0] = value
    return model, x, "3" if place == "bias" else "0"


PLACES = pytest.mark.parametrize("place", ["weight", "bias", "input"])
VALUES = pytest.mark.parametrize("value", [math.nan, math.inf])


@PLACES
@VALUES
def test_layer_errors_name_the_first_layer(place: str, value: float) -> None:
    model, x, first = broken(place, value)
    found = torchq.layer_errors(model, [x], progress=False)
    assert f"NaN or infinity comes first from {first}: look at its weight" in str(found)
    assert found.first_not_finite is not None and found.first_not_finite.name == first
    row = next(row for row in found.rows if row.name == first)
    assert math.isnan(row.cosine)
    assert math.isnan(found.worst[0].local_sqnr) and math.isnan(found.output_sqnr)


@PLACES
def test_the_report_does_not_call_nan_equal_predictions(place: str) -> None:
    model, x, first = broken(place, math.nan)
    found = torchq.report(model, [x], plan=False, progress=False)
    verdict, outputs = found.data["verdict"], found.data["outputs"]
    assert outputs["agreement"] == (0.0 if place != "input" else 0.75)
    assert verdict["grade"] == "poor" and not verdict["blame"]
    assert f"NaN or infinity for these batches, and {first} is the first" in verdict["sentence"]
    assert "exclude" not in str(verdict["advice"])


@VALUES
@pytest.mark.parametrize("metric", ["sqnr", "fisher"])
def test_a_ranking_without_values_recommends_nothing(metric: str, value: float) -> None:
    model, x, _ = broken("bias", value)
    text = str(torchq.sensitivity(model, [x], metric, progress=False))
    assert "exclude" not in text
    assert "torchq.layer_errors names the layer that NaN or infinity comes from" in " ".join(
        text.split()
    )


def test_mixed_precision_names_what_is_wrong() -> None:
    model, x, _ = broken("bias", math.nan)
    with pytest.raises(CalibrationError, match=r"damage of NaN for 0 in w8a8; .*layer_errors"):
        torchq.mixed_precision(model, [x], budget={"mean_bits": 6}, progress=False)


def test_one_of_two_outputs_is_enough() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model, x = Two().eval(), torch.randn(3, 4)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    model.b.bias.data[0] = math.nan
    assert math.isnan(torchq.layer_errors(model, [x], progress=False).output_sqnr)


@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "openvino"])
def test_deploy_refuses_a_simulation_that_returns_nan(engine: str) -> None:
    if engine != "torch":
        pytest.importorskip(engine)
    model, x, _ = broken("bias", math.nan)
    with pytest.raises(ExportError, match=r"deploy: result 0 of the simulation is NaN .*layer_err"):
        torchq.deploy(model, x, target=engine, progress=False)


def test_deploy_takes_models_that_mask_scores_by_infinity() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).index_fill(1, torch.tensor([1, 4]), -math.inf)

    model, x = Masked().eval(), torch.randn(3, 8)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, x, progress=False)
    torch.testing.assert_close(int8(x), model(x), rtol=1e-5, atol=1e-5)
