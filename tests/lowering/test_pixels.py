"""Convolutions of pooled images, and functions that do nothing outside training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import Int8Conv
from torchq.lowering.modules.float_pointwise_conv import FloatPointwiseConv
from torchq.lowering.modules.qdq import Quantize

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.AdaptiveAvgPool2d(1),
    "pair": nn.AdaptiveAvgPool2d((1, 1)),
    "function": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "torch.mean": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True),
    "positional": lambda x: x.mean((2, 3), True),
}
NO_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "larger": nn.AdaptiveAvgPool2d(2),
    "rows": lambda x: x.mean(2, keepdim=True),
    "channels": lambda x: x.mean((1, 2), keepdim=True).expand(-1, 8, -1, -1),
    "none": lambda x: x,
}


class Squeeze(nn.Module):
    """Squeeze and excitation between two convolutions."""

    def __init__(
        self,
        pool: Callable[[Tensor], Tensor],
        activation: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.down, self.up = nn.Conv2d(8, 4, 1, bias=bias), nn.Conv2d(4, 8, 1, bias=bias)
        self.pool, self.act = pool, activation or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x * torch.sigmoid(self.up(self.act(self.down(self.pool(x))))))


def pixels(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, FloatPointwiseConv)]


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 9, 9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_layers_of_one_pixel_compute_in_floating_point(
    images: Tensor, pool: str, bias: bool
) -> None:
    model = calibrated(Squeeze(copy.deepcopy(POOLS[pool]), bias=bias), images)
    int8 = torchq.deploy(model, images)
    assert pixels(int8) == ["down", "up"]
    assert (
        sum(isinstance(m, Quantize) for m in int8.modules()) == 2
    )  # the image and the input of the last layer
    for x in (images, images[:1, :, 2:], images[:0]):
        assert int8(x).shape == model(x).shape
        assert not x.numel() or sqnr(int8(x), model(x)) > 40
    assert "float32, one pixel" in str(torchq.summary(int8))


@pytest.mark.parametrize("pool", NO_POOLS)
def test_others_stay_on_integers(images: Tensor, pool: str) -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(NO_POOLS[pool](self.first(x)))

    model = calibrated(Pooling(), images)
    int8 = torchq.deploy(model, images)
    assert pixels(int8) == []
    assert sqnr(int8(images), model(images)) > 40


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.GELU(), nn.PReLU()],
    ids=lambda m: type(m).__name__,
)
def test_activations_between_pixels(images: Tensor, activation: nn.Module) -> None:
    model = calibrated(Squeeze(nn.AdaptiveAvgPool2d(1), activation), images)
    int8 = torchq.deploy(model, images)
    assert pixels(int8)[0] == "down"
    assert sqnr(int8(images), model(images)) > 40


@pytest.mark.parametrize(
    "kernel",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 1, "groups": 8},
        {"kernel_size": 1, "padding": 1},
    ],
)
def test_other_kernels_stay_on_integers(images: Tensor, kernel: dict[str, int]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, **kernel))  # type: ignore[arg-type]
    model = calibrated(network, images)
    int8 = torchq.deploy(model, images)
    assert pixels(int8) == []
    assert sqnr(int8(images), model(images)) > 40


def test_large_weights_are_read_as_integers(images: Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(3, 512, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(512, 257, 1))
    assert pixels(torchq.deploy(calibrated(network, images), images)) == []


def test_pooled_codes_stay_codes(images: Tensor) -> None:
    model = Squeeze(nn.AdaptiveAvgPool2d(1)).eval()
    torchq.quantize_(model, target="tensorrt")
    torchq.calibrate(model, [images], progress=False)
    int8 = torchq.deploy(model, images)
    assert type(int8.get_submodule("down")) is Int8Conv and pixels(int8) == []
    assert sqnr(int8(images), model(images)) > 40


def test_a_pixel_layer_is_the_simulation_of_its_layer() -> None:
    model = calibrated(nn.Conv2d(8, 5, 1), torch.randn(4, 8, 1, 1))
    layer = torchq.deploy(model)
    assert isinstance(layer, Int8Conv) and FloatPointwiseConv.fits(layer)
    pixel, x = FloatPointwiseConv(layer), 2 * torch.randn(6, 8, 1, 1)
    assert sqnr(pixel(x), model(x)) > 110  # the same sums in another order
    codes, layer.reads_codes, pixel.reads_codes = layer.codes(x), True, True
    assert torch.equal(pixel(codes), layer(codes))
    larger = torch.randn(2, 8, 3, 3)
    assert torch.equal(pixel(larger), layer(larger))
    assert copy.deepcopy(pixel).to(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16


def test_copies_and_other_states(images: Tensor) -> None:
    int8, other = (
        torchq.deploy(calibrated(Squeeze(nn.AdaptiveAvgPool2d(1)), images), images)
        for _ in range(2)
    )
    expected = int8(images)
    assert not torch.equal(other(images), expected)
    other.load_state_dict(int8.state_dict())
    for copied in (other, copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))):
        assert pixels(copied) and torch.equal(copied(images), expected)
    assert sqnr(torch.export.export(int8, (images,)).module()(images), expected) > 40


def stochastic_depth(input: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    return input * torch.bernoulli(torch.tensor(1 - p)) if training else input


fx.wrap("stochastic_depth")


class Dropping(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.active = training

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.active)
        return self.last(
            stochastic_depth(F.dropout2d(x, training=self.active), 0.5, "row", self.active)
        )


@pytest.mark.parametrize("training", [False, True])
def test_functions_that_drop_nothing_do_not_part_layers(images: Tensor, training: bool) -> None:
    int8 = torchq.deploy(calibrated(Dropping(training), images))
    assert isinstance(int8, fx.GraphModule)
    assert (int8.get_submodule("first").output_qparams is None) == training
    assert sum("drop" in str(node.target) for node in int8.graph.nodes) == 2 * training
