"""Teaching fuse_ a block, and the engines behind it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.common import fused_exactly, image, randomized
from torchq.errors import ConfigError
from torchq.fusion import register_block
from torchq.fusion.blocks import BLOCKS
from torchq.fusion.linear_map import (
    Geometry,
    NotAffine,
    apply_map,
    collapse,
    extract,
    linear_map,
    relative_error,
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 4, 3, padding=1)
        self.narrow = nn.Conv2d(4, 4, 1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        is_merged = hasattr(self, "merged_conv")
        return self.act(
            self.merged_conv(x) if is_merged else self.wide(x) + self.narrow(x)
        )


@pytest.mark.parametrize(
    "decorate",
    [Two, lambda block: hasattr(block, "wide") and hasattr(block, "narrow")],
    ids=["class", "predicate"],
)
def test_register_block(decorate: Any) -> None:
    fields = {
        "branches": ("wide", "narrow"),
        "writes": "merged_conv",
        "bypass": ("act",),
    }
    register_block("two", **fields)(decorate)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(Two()).double().eval()
        assert fused_exactly(model, image()).fused[0].kind == "two"
        assert sorted(model.state_dict()) == [
            "0.merged_conv.bias",
            "0.merged_conv.weight",
        ]
        with pytest.raises(
            ConfigError, match="block family 'two' is registered already"
        ):
            register_block("two")(Two)
    finally:
        BLOCKS.remove("two")


def test_register_block_wants_a_class_or_predicate() -> None:
    with pytest.raises(ConfigError, match="got 3; expected a class or a predicate"):
        register_block("three")(3)


def square(
    window: int, groups: int = 1, stride: int = 1, out_channels: int = 8
) -> Geometry:
    pads = (window // 2,) * 2
    return Geometry(
        4,
        out_channels,
        groups,
        (window,) * 2,
        pads,
        pads,
        (stride,) * 2,
    )


def linear_block(groups: int, stride: int) -> Any:
    torch.manual_seed(0)
    layers = nn.ModuleList(
        [
            nn.Conv2d(4, 8, 3, stride, 1, groups=groups),
            nn.Conv2d(4, 8, 1, stride, groups=groups),
        ]
    ).double()
    return lambda x: layers[0](x) - 0.5 * layers[1](x)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_both_engines_find_the_same_map(
    gradients: bool, groups: int, stride: int
) -> None:
    function = linear_block(groups, stride)
    three = square(3, groups, stride)
    geometry, value = (
        extract(function, three) if gradients else collapse(function, 4, 2)
    )
    assert geometry == three
    for size in (9, 10, 11):
        x = torch.randn(2, 4, size, size + 1, dtype=torch.float64)
        assert relative_error(apply_map(x, geometry, value), function(x)) <= 1e-12


NOT_LINEAR = {
    "relu": F.relu,
    "product": lambda x: x * x,
    "depends on the position": lambda x: x * torch.arange(x.shape[-1], dtype=x.dtype),
    "batch": lambda x: x + x.mean(0, keepdim=True),
    "attention": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "bias then padding": lambda x: F.pad(x + 1, (1, 1, 1, 1)),
    "two windows with padding": lambda x: F.avg_pool2d(
        F.avg_pool2d(x, 3, 1, 1), 3, 1, 1
    ),
    "max": lambda x: F.max_pool2d(x, 3, 1, 1),
    "flip": lambda x: x.flip(-1),
    "flatten": lambda x: x.flatten(1),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_one_convolution_is_rejected(name: str) -> None:
    with pytest.raises(NotAffine):
        linear_map(
            NOT_LINEAR[name],
            4,
            2,
            square(3, out_channels=4),
        )


LINEAR = {
    "methods": lambda x: x.add(x, alpha=2).add(1.5).sub(0.5).mul(3.0).div(2.0).neg(),
    "crop": lambda x: x[:, :, 1:-1, 2:],
    "pad": lambda x: F.pad(x, (1, 0, 2, 1)),
    "pad and pool": lambda x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1),
    "pool of a pool": lambda x: F.avg_pool2d(F.avg_pool2d(x, 2, 1), 2, 2),
    "negative": lambda x: 1.5 - (-x) / 2 + torch.ones(1, 4, 1, 1, dtype=torch.float64),
    "sum": lambda x: sum([x, x * 2, torch.add(x, x, alpha=3)]),
    "dimensions": lambda x: x * 2.0 if x.ndim == 4 and x.dim() == 4 else x,
    "leaky relu of slope one": lambda x: F.leaky_relu(x, 1.0),
    "dropout": lambda x: F.dropout(x, 0.5, training=False).contiguous(),
    "pointwise then window": lambda x: F.avg_pool2d(
        F.conv2d(x, torch.eye(4, dtype=torch.float64)[:, :, None, None]), 3, 2, 1
    ),
    "same": lambda x: F.conv2d(
        x, torch.ones(4, 4, 3, 3, dtype=torch.float64), padding="same", dilation=2
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_one_convolution_collapses(name: str) -> None:
    geometry, value = collapse(LINEAR[name], 4, 2)
    x = torch.randn(2, 4, 12, 13, dtype=torch.float64)
    assert relative_error(apply_map(x, geometry, value), LINEAR[name](x)) <= 1e-12


def test_linear_layers_are_maps_without_window() -> None:
    model = randomized(
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    )
    features = Geometry(4, 3, 1, (), (), (), ())
    for geometry, value in (collapse(model, 4, 0), extract(model, features)):
        x = torch.randn(5, 4, dtype=torch.float64)
        assert geometry.window == ()
        assert relative_error(apply_map(x, geometry, value), model(x)) <= 1e-12
