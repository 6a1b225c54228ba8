"""Biases that are rounded as ONNX Runtime rounds them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr


@pytest.fixture
def x() -> Tensor:
    """Return images without negative values."""
    return torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(x: Tensor) -> nn.Module:
    """Return calibrated convolutions whose grids a file holds as they are."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=2), nn.ReLU()]
    result = nn.Sequential(*layers, nn.Conv2d(16, 8, 1, bias=False), nn.Linear(8, 8)).eval()
    config = torchq.recipes.integer(unsigned="auto")
    torchq.quantize_(result, config, target="onnxruntime", example=x)
    torchq.calibrate(result, [x], progress=False)
    return result


def test_biases_become_multiples_of_both_scales(model: nn.Module, x: Tensor) -> None:
    before = copy.deepcopy(model)
    assert torchq.onnx.round_biases_(model) == ("0", "2")
    for name in ("0", "2"):
        layer, old = model.get_submodule(name), before.get_submodule(name)
        steps = layer.input_quantizer.scale * layer.weight_quantizer.scale.flatten()
        numbers = (layer.bias / steps).double()
        assert torch.allclose(numbers, numbers.round(), atol=1e-2)
        assert not torch.equal(layer.bias, old.bias)
        assert bool(((layer.bias - old.bias).abs() <= 0.51 * steps).all())
    assert torch.equal(model[5].bias, before[5].bias)
    rounded = copy.deepcopy(model)
    torchq.onnx.round_biases_(model)
    assert torch.allclose(model[0].bias, rounded[0].bias, rtol=1e-6)


def test_layers_without_ranges_stay_as_they_are(model: nn.Module) -> None:
    model[0].input_quantizer.mode = "off"
    before = model[0].bias.clone()
    assert torchq.onnx.round_biases_(model) == ("2",)
    assert torch.equal(model[0].bias, before)
    assert torchq.onnx.round_biases_(nn.Sequential(nn.Conv2d(3, 8, 3))) == ()


def test_onnxruntime_then_computes_the_same(model: nn.Module, x: Tensor) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    head = model[:4]
    images = torch.rand(64, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    before = sqnr(torchq.deploy(head, x, engine="onnxruntime")(images), head(images))
    torchq.onnx.round_biases_(head)
    after = sqnr(torchq.deploy(head, x, engine="onnxruntime")(images), head(images))
    assert after > before + 6
