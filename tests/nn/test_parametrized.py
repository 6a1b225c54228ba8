"""Layers with parametrizations of torch: their weight is quantized after the parametrization."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import torchq
from torchq.nn import QuantConv2d, QuantLinear

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Double(nn.Module):
    """A parametrization of somebody else."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Double()),
}


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    for layer in (model[0], model[4]):
        PARAMETRIZATIONS[name](layer)
    return model.eval()


def quantized(name: str) -> nn.Sequential:
    model = network(name)
    report = torchq.quantize_(model)
    assert [d.name for d in report.replaced] == ["0", "4"]
    assert [d.name for d in report.skipped] == ["2"]  # the pool
    torchq.calibrate(model, [X], progress=False)
    return model


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_the_computed_weight_is_quantized(name: str) -> None:
    """It computes what the layer with the baked weight computes when that is quantized."""
    model, baked = quantized(name), network(name)
    for layer in (baked[0], baked[4]):
        parametrize.remove_parametrizations(layer, "weight")
    torchq.quantize_(baked)
    torchq.calibrate(baked, [X], progress=False)
    assert isinstance(model[0], QuantConv2d) and isinstance(model[4], QuantLinear)
    assert torch.equal(model(X), baked(X))


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_restore_gives_the_parametrized_layer_back(name: str) -> None:
    model, floating = quantized(name), network(name)
    torchq.restore_(model)
    assert torch.equal(model(X), floating(X))
    assert parametrize.type_before_parametrizations(model[0]) is nn.Conv2d
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Conv2d
    torch.testing.assert_close(model(X), floating(X))


def test_torch_removes_the_parametrization_of_a_quantized_layer() -> None:
    model = quantized("weight_norm")
    expected = model(X)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is QuantConv2d
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_files_and_copies(name: str, tmp_path: Path) -> None:
    model = quantized(name)
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(network(name), tmp_path / "model.pt").eval()
    assert torch.equal(loaded(X), model(X))


def test_the_originals_are_trained() -> None:
    model = quantized("weight_norm")
    model(X).square().sum().backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert gradients == {name for name, _ in model.named_parameters()}
    assert "0.parametrizations.weight.original1" in gradients


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_integer_kernels_get_the_computed_weight(name: str) -> None:
    model = quantized(name)
    int8 = torchq.deploy(model, X)
    # Float32 sums differ in their last bits.
    torch.testing.assert_close(int8(X), model(X), rtol=1e-5, atol=1e-5)
