"""Transposed convolutions on integers against the simulation in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.lowering.common import BITS, calibrated, recipe, sqnr
from torchq.lowering import Int8ConvTranspose

PER_TENSOR = torchq.recipes.integer(BITS, 8, per_channel=False)
PER_TENSOR = torchq.recipes.integer(BITS, 8, per_channel=False)
LAYERS = [
    ("as wide as the stride", nn.ConvTranspose2d(4, 6, 2, 2), (2, 4, 5, 3)),
    ("twice as wide", nn.ConvTranspose2d(4, 6, 4, 2, 1), (2, 4, 5, 3)),
    ("odd", nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1), (2, 4, 5, 3)),
    ("without output padding", nn.ConvTranspose2d(4, 6, 3, 2, 1), (2, 4, 5, 3)),
    (
        "more output padding than kernel",
        nn.ConvTranspose2d(4, 6, 2, 3, output_padding=2, bias=False),
        (2, 4, 5, 3),
    ),
    ("narrower than the stride", nn.ConvTranspose1d(4, 6, 2, 5), (2, 4, 7)),
    ("dilated", nn.ConvTranspose2d(4, 6, 3, 2, 2, dilation=2), (2, 4, 5, 6)),
    (
        "output padding by dilation",
        nn.ConvTranspose1d(4, 6, 3, 1, dilation=3, output_padding=2),
        (2, 4, 5),
    ),
    ("more padding than kernel", nn.ConvTranspose1d(4, 6, 3, 2, 4), (2, 4, 9)),
    ("stride 1", nn.ConvTranspose2d(4, 6, 3, 1, 1), (2, 4, 5, 3)),
    ("unequal", nn.ConvTranspose2d(4, 6, (3, 4), (2, 3), (0, 1), (1, 2)), (2, 4, 5, 3)),
    ("groups", nn.ConvTranspose2d(4, 6, 4, 2, 1, groups=2), (2, 4, 5, 3)),
    ("depthwise", nn.ConvTranspose2d(4, 4, (4, 3), 2, 1, groups=4), (2, 4, 5, 3)),
    ("3d", nn.ConvTranspose3d(4, 6, (2, 3, 4), (1, 3, 2), (0, 1, 1), groups=2), (2, 4, 3, 2, 4)),
    ("unbatched", nn.ConvTranspose2d(4, 6, 4, 2, 1), (4, 5, 3)),
    ("empty", nn.ConvTranspose2d(4, 6, 4, 2, 1), (0, 4, 5, 3)),
]


@pytest.mark.parametrize(
    ("layer", "shape"), [case[1:] for case in LAYERS], ids=[case[0] for case in LAYERS]
)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("config", [None, PER_TENSOR], ids=["per channel", "per tensor"])
def test_a_layer_equals_its_simulation(
    layer: Any, shape: tuple[int, ...], positive: bool, config: torchq.QuantConfig | None
) -> None:
    torch.manual_seed(0)  # a weight next to a tie has another code in float64
    layer.reset_parameters()
    x = torch.randn(shape).abs() if positive else torch.randn(shape)
    model = calibrated(copy.deepcopy(layer), x if x.numel() else torch.randn(2, *shape[1:]), config)
    int8 = torchq.deploy(model)
    assert isinstance(int8, Int8ConvTranspose)
    expected, found = copy.deepcopy(model).double()(x.double()), int8(x)
    assert found.dtype is torch.float32
    # Integer sums are exact; float32 keeps 2**-24 of the largest partial sum, which a zero point
    # of 128 makes larger than the result.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)
    codes, int8.reads_codes = int8.codes(x), True
    torch.testing.assert_close(int8(codes), found, rtol=1e-5, atol=2e-5)


def test_a_kernel_as_wide_as_the_stride_becomes_one_of_size_1() -> None:
    layer = torchq.deploy(calibrated(nn.ConvTranspose2d(4, 6, 2, 2), torch.randn(1, 4, 3, 3)))
    assert layer.weight_codes.shape == (24, 4, 1, 1)
    assert layer.params.padding == (0, 0)


@pytest.mark.parametrize("added", [(0, 0), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("positive", [False, True])
def test_output_size(added: tuple[int, int], padding: int, positive: bool) -> None:
    x = torch.randn(2, 4, 5, 3)
    x = x.abs() if positive else x
    model = calibrated(nn.ConvTranspose2d(4, 6, 3, (3, 4), padding), x)
    int8 = torchq.deploy(model)
    size = [a + b for a, b in zip(model(x).shape[2:], added, strict=True)]
    for found, expected in [
        (int8(x, size), model(x, size)),
        (int8(x, output_size=torch.Size([2, 6, *size])), model(x, [2, 6, *size])),
        (int8(x[0], [6, *size]), model(x[0], [6, *size])),
    ]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [[12, 9], [16, 9], [13], [4, 13, 9], [1, 2, 6, 13, 9]], ids=str)
def test_output_sizes_that_do_not_exist(size: list[int]) -> None:
    x = torch.randn(2, 4, 5, 3)
    layer = torchq.deploy(calibrated(nn.ConvTranspose2d(4, 6, 1, (3, 4)), x))
    with pytest.raises(
        torchq.errors.ConfigError,
        match=r"got output_size \[.*\]; expected one from \[13, 9\] to \[15, 12\]",
    ):
        layer(x, size)


# --- in models ---------------------------------------------------------------------------------


def test_an_input_that_a_target_left_float_is_named() -> None:
    x = torch.randn(2, 3, 8, 8)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 4, 1)
    model = nn.Sequential(*layers).eval()
    torchq.quantize_(model, recipe(), target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    text = "the weight of 2 is quantized, but the input is not"
    with pytest.warns(UserWarning, match=text) as warned:
        int8 = torchq.deploy(model, x, target="torch")
    assert warned[0].filename == __file__
    assert sqnr(int8(x), model(x)) > 40
    assert [row.kernel for row in torchq.summary(int8).layers].count("simulated") == 1
