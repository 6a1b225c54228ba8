"""Choices by the error at the output of a layer: method="auto" and weights="activation"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import CalibrationError, ConfigError

METHODS = ("max", "percentile", "mse", "lp", "entropy")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4)
    ).eval()


def batches() -> list[Tensor]:
    """Return few images, so that all of them are samples, with some large values."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    x[0, 1, 2, 3] = 30.0
    return [x]


def quantized(bits: int = 4, **changes: Any) -> Any:
    model = net()
    torchq.quantize_(model, torchq.recipes.integer(8, bits, weight_method="max", **changes))
    return model


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_takes_the_method_of_least_error_at_the_output(bits: int, symmetric: bool) -> None:
    model, floats = quantized(bits, symmetric=symmetric), net()
    report = torchq.calibrate(model, batches(), method="auto", progress=False)
    errors: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        inputs = {"0": batches()[0]}
        inputs["2"] = floats[:2](inputs["0"])
        inputs["4"] = floats[:4](inputs["0"])
        for method in METHODS:
            other = quantized(bits, symmetric=symmetric)
            torchq.calibrate(other, batches(), method=method, progress=False)
            for name, x in inputs.items():
                layer = floats.get_submodule(name)
                found = layer(other.get_submodule(name).input_quantizer(x))
                error = (found - layer(x)).square().sum().item()
                errors.setdefault(f"{name}.input_quantizer", {})[method] = error
    assert report.methods.keys() == errors.keys()
    for name, chosen in report.methods.items():
        least = min(errors[name].values())
        # Images of more than 64 pixels are sampled, so a nearly equal method may win.
        assert errors[name][chosen] <= 1.15 * least, (name, errors[name])
        assert f"({chosen}," in str(report) or f"({chosen})" in str(report)
    assert not model[0]._forward_pre_hooks


def test_auto_chooses_the_sign_and_treats_quantizers_of_no_layer() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.add = nn.Linear(6, 6), torchq.nn.Add()

        def forward(self, x: Tensor) -> Tensor:
            return self.add(self.first(x), x)

    model = Sum()
    d = torchq.QuantDescriptor(4, unsigned="auto")
    rules = (torchq.Rule("first", input=d), torchq.Rule("add", input=d))
    torchq.quantize_(model, torchq.QuantConfig(rules))
    report = torchq.calibrate(model, [torch.rand(32, 6)], method="auto", progress=False)
    assert {name.split(".")[0] for name in report.methods} == {"first", "add"}
    assert model.first.input_quantizer.descriptor.unsigned is True  # type: ignore[union-attr]


def test_weights_by_activation_have_less_error_than_other_methods() -> None:
    errors = {}
    for method in ("max", "mse", "activation"):
        model = net()
        torchq.quantize_(model, torchq.recipes.integer(3, None))
        torchq.calibrate(model, batches(), weights=method, progress=False)
        with torch.no_grad():
            x = batches()[0]
            errors[method] = (model[0](x) - net()[0](x)).square().sum().item()
    assert errors["activation"] < 0.9 * min(errors["max"], errors["mse"])


def test_recipes_of_few_bits_search_and_others_do_not() -> None:
    for bits, searched in ((4, True), (8, False)):
        models = []
        for weights in (None, "activation" if searched else "max"):
            model = net()
            torchq.quantize_(model, torchq.recipes.integer(bits, 8))
            torchq.calibrate(model, batches(), weights=weights, progress=False)
            models.append(model.state_dict())
        assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())


def test_without_batches_weights_take_their_largest_magnitude() -> None:
    models = []
    for weights in ("max", "activation"):
        model = net()
        torchq.quantize_(model, torchq.recipes.integer(4, None))
        torchq.calibrate(model, weights=weights)
        models.append(model.state_dict())
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())


def test_bad_input_is_named() -> None:
    model = quantized()
    with pytest.raises(ConfigError, match="calibrate: got weights='magic'; expected one of: max, "):
        torchq.calibrate(model, batches(), weights="magic")
    with pytest.raises(CalibrationError, match="got NaN or infinite values"):
        torchq.calibrate(model, [batches()[0] * torch.nan], method="auto", progress=False)
    with pytest.raises(CalibrationError, match="calibrate: got no batch; expected at least one"):
        torchq.calibrate(quantized(), [], method="auto", progress=False)
