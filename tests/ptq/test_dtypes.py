"""Every algorithm on models whose weights are no float32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.ptq import adaround_, correct_bias_, equalize_, gptq_, smooth_

DTYPES = (torch.float16, torch.bfloat16, torch.float64)
# Factors change 16-bit weights by half a unit in the last place each, and the output with them.
MOST_CHANGE = {torch.float16: 8e-3, torch.bfloat16: 6e-2, torch.float64: 1e-5}


class Net(nn.Module):
    """Two convolutions, and behind a norm two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
        )
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.features(x).mean((2, 3)))
        return self.head(torch.tanh(self.hidden(x)))


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        model.features[0].weight[1] *= 7.0  # type: ignore[index]
        model.norm.weight[2] = 9.0
    return model.to(dtype)


def batches(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 8, 8, generator=generator).to(dtype) for _ in range(4)]


def outputs(model: nn.Module, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x) for x in batches(dtype)]).double()


def error(model: nn.Module, expected: Tensor, dtype: torch.dtype) -> float:
    actual = outputs(model, dtype)
    return ((actual - expected).norm() / expected.norm()).item()


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


AFTER: dict[str, Callable[[Any, list[Tensor]], object]] = {
    "correct_bias_": lambda m, b: correct_bias_(m, b, progress=False),
    "gptq_": lambda m, b: gptq_(m, b, progress=False),
    "adaround_": lambda m, b: adaround_(m, b, steps=15, progress=False),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", AFTER)
def test_what_follows_calibration_makes_the_output_no_worse(
    name: str, dtype: torch.dtype
) -> None:
    model = net(dtype)
    expected = outputs(model, dtype)
    torchq.quantize_(model, torchq.recipes.integer(3, 8))
    torchq.calibrate(model, batches(dtype), progress=False)
    before = error(model, expected, dtype)
    kinds = dtypes_of(model)
    AFTER[name](model, batches(dtype))
    # Biases of single layers are corrected for their own mean, not for the output of the model.
    most = before * (1.1 if name == "correct_bias_" else 1.0 + 1e-6)
    assert error(model, expected, dtype) <= most
    assert dtypes_of(model) == kinds


BEFORE: dict[str, Callable[[Any, list[Tensor]], object]] = {
    "smooth_": lambda m, b: smooth_(m, b, alpha=0.5, progress=False),
    "equalize_": lambda m, b: equalize_(m, b[0]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BEFORE)
def test_what_precedes_calibration_keeps_the_float_output(
    name: str, dtype: torch.dtype
) -> None:
    model = net(dtype)
    torchq.quantize_(model, torchq.recipes.integer(4, 8))
    floats = copy.deepcopy(model)
    with torchq.disabled(model):
        expected = outputs(model, dtype)
        BEFORE[name](model, batches(dtype))
        actual = outputs(model, dtype)
    changed = [
        n for n, p in model.named_parameters() if not p.equal(floats.get_parameter(n))
    ]
    assert changed
    assert (actual - expected).norm() <= MOST_CHANGE[dtype] * expected.norm()
    assert dtypes_of(model) == dtypes_of(floats)


@pytest.mark.parametrize("name", AFTER)
def test_modes_and_other_modules_stay_and_as_many_batches_are_read_as_asked_for(
    name: str,
) -> None:
    states = []
    function: Any = {
        "gptq_": gptq_,
        "correct_bias_": correct_bias_,
        "adaround_": adaround_,
    }[name]
    options = {"steps": 2} if name == "adaround_" else {}
    for given in (batches(torch.float32)[:3], iter(batches(torch.float32))):
        model: Any = net(torch.float32).train()
        torchq.quantize_(model, torchq.recipes.integer(3, 8))
        torchq.calibrate(model, batches(torch.float32), progress=False)
        model.hidden.input_quantizer.mode = "off"
        report = function(model, given, num_batches=3, progress=False, **options)
        assert report.batches == 3
        assert model.training
        assert model.hidden.input_quantizer.mode == "off"
        assert not any(
            "forward" in vars(m) or m._forward_hooks for m in model.modules()
        )
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
