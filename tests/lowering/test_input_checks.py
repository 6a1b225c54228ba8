"""Deployed models refuse the inputs that their simulation refuses, and NaN, which has no code."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated
from torchq.lowering import Int8Conv
from torchq.runtimes import Torch

D = torchq.QuantDescriptor
WEIGHT = D(8, axis=0)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 9, 9, generator=GENERATOR)
TOKENS = torch.randn(4, 16, generator=GENERATOR)


def linear(input: torchq.QuantDescriptor, weight: torchq.QuantDescriptor) -> nn.Module:
    rule = torchq.Rule(nn.Linear, input=input, weight=weight)
    config = torchq.recipes.int8().with_rules(rule)
    return calibrated(nn.Sequential(nn.Linear(16, 16)), TOKENS, config)


class Excitation(nn.Module):
    """A convolution of one pixel behind global pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv(self.pool(x))


MODELS = {
    "conv": lambda: calibrated(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), X
    ),
    "pixel": lambda: calibrated(Excitation(), X),
    "static": lambda: linear(D(8), WEIGHT),
    "dynamic": lambda: linear(D(8, dynamic=True, axis=0), WEIGHT),
}
CASES = pytest.mark.parametrize("name", MODELS)
FUSE = pytest.mark.parametrize("fuse", [True, False])


def example(name: str) -> Tensor:
    return (X if name in ("conv", "pixel") else TOKENS).clone()


@CASES
@FUSE
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, torch.bool, torch.float64, torch.bfloat16],
    ids=str,
)
def test_dtypes_that_the_simulation_refuses(
    name: str, fuse: bool, dtype: torch.dtype
) -> None:
    model = MODELS[name]()
    x = (10 * example(name)).to(dtype)
    if name == "pixel" and not dtype.is_floating_point:
        pytest.skip("pooling refuses it first")
    with pytest.raises((TypeError, RuntimeError, KeyError)):
        model(x)
    with pytest.raises(
        TypeError, match=rf"got a tensor of {dtype}; expected torch.float32"
    ):
        torchq.deploy(model, target=Torch(fuse=fuse))(x)


@CASES
@FUSE
def test_nan_does_not_become_a_number(name: str, fuse: bool) -> None:
    model = MODELS[name]()
    x = example(name)
    x.view(-1)[5] = torch.nan
    assert bool(model(x).isnan().any())
    int8 = torchq.deploy(model, target=Torch(fuse=fuse))
    if name == "dynamic":
        assert torch.equal(
            int8(x).isnan(),
            model(x).isnan(),
        )
    else:
        with pytest.raises(
            torchq.errors.QuantizationError, match="got NaN; expected numbers"
        ):
            int8(x)


@pytest.mark.eight_bit_products
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["conv", "static"])
def test_infinity_saturates_as_in_the_simulation(name: str, sign: int) -> None:
    model = MODELS[name]()
    x = example(name)
    x.view(-1)[5] = sign * torch.inf
    torch.testing.assert_close(
        torchq.deploy(model)(x),
        model(x),
        rtol=1e-5,
        atol=1e-5,
    )


@CASES
@FUSE
def test_autocast_converts_what_layers_hand_on(name: str, fuse: bool) -> None:
    model = MODELS[name]()
    x = example(name).bfloat16()
    int8 = torchq.deploy(model, target=Torch(fuse=fuse))
    with torch.autocast("cpu", torch.bfloat16):
        assert int8(x).shape == model(x).shape
        with pytest.raises(TypeError, match=r"got a tensor of torch\.float64"):
            int8(x.double())


def test_an_image_is_not_taken_for_codes() -> None:
    layer = torchq.deploy(
        calibrated(nn.Conv2d(3, 8, 3), X),
        target=Torch(fuse=False),
    )
    assert isinstance(layer, Int8Conv)
    with pytest.raises(TypeError, match=r"Int8Conv: got a tensor of torch\.uint8"):
        layer(torch.zeros(1, 3, 9, 9, dtype=torch.uint8))


SMALL = {
    "1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8), (2, 3, 2)),
    "3d": (
        lambda: nn.Conv3d(3, 4, 3),
        (2, 3, 6, 6, 6),
        (2, 3, 2, 6, 6),
    ),
    "one image": (lambda: nn.Conv2d(3, 4, 3, 2), (3, 8, 8), (3, 2, 2)),
    "padded": (lambda: nn.Conv2d(3, 4, 5, padding=1), (2, 3, 8, 8), (2, 3, 2, 2)),
    "dilated": (
        lambda: nn.Conv2d(3, 3, 3, dilation=3, groups=3),
        (2, 3, 9, 9),
        (2, 3, 6, 9),
    ),
    "second layer": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        *((2, 3, 9, 9), (2, 3, 4, 4)),
    ),
}


@FUSE
@pytest.mark.parametrize("case", SMALL)
def test_images_that_are_smaller_than_the_kernel(case: str, fuse: bool) -> None:
    make, shape, small = SMALL[case]
    model = calibrated(make(), torch.randn(shape))
    int8 = torchq.deploy(
        model,
        torch.randn(shape),
        target=Torch(fuse=fuse),
    )
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        model(torch.randn(small))
    refusal = (
        r"Int8Conv: got an image of size \(.*\); expected one as large as the kernel"
    )
    for _ in range(2):
        with pytest.raises(
            (torchq.errors.InputError, RuntimeError), match=f"{refusal}|size can't"
        ):
            int8(torch.randn(small))
    assert int8(torch.randn(shape)).shape == model(torch.randn(shape)).shape
