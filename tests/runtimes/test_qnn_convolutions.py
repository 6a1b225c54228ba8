"""Files for a Snapdragon whose averages, factors and windows are forms that it computes rightly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.onnx.ir import (
    attribute,
    load_model,
    nodes_of,
    replace_stored,
    save_model,
    value_of,
)
from torchq.onnx.qdq import weight_nodes
from torchq.runtimes import Qnn
from torchq.runtimes.qnn.bounds import Between, bound_of

pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")

X = torch.randn(1, 3, 18, 18, generator=torch.Generator().manual_seed(0))
_CHANNELS = 16


class Around(nn.Module):
    """Something between two convolutions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, _CHANNELS, 3, padding=1)
        self.inner = inner
        self.last = nn.Conv2d(_CHANNELS, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Factors(nn.Module):
    """One number for each channel."""

    def __init__(self, size: float) -> None:
        super().__init__()
        steps = torch.linspace(-1.5, 1.0, _CHANNELS).reshape(_CHANNELS, 1, 1)
        self.factors = nn.Parameter(size * steps)

    def forward(self, x: Tensor) -> Tensor:
        return self.factors * x


class Normalised(nn.Module):
    """A norm behind a concatenation, which no convolution takes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(_CHANNELS, 8, 1)
        self.b = nn.Conv2d(_CHANNELS, 8, 1)
        self.norm = nn.BatchNorm2d(_CHANNELS)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.3, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([self.a(x), self.b(x)], 1)).relu()


class LastChannels(nn.Module):
    """A layer for channels in the last dimension of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(_CHANNELS, _CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Called(nn.Module):
    """A layer that is called as a function, whose result stays float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(_CHANNELS, _CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.linear(x, self.layer.weight, self.layer.bias)
        return x.roll(1, 1).permute(0, 3, 1, 2)


def by_channel(size: int, stride: int, padding: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(_CHANNELS, _CHANNELS, size, stride, padding, groups=_CHANNELS)


def exported(inner: nn.Module, path: Path, bits: int) -> nn.Module:
    """Return a network in codes of so many bits, and write its file."""
    config = torchq.recipes.w8a16() if bits == 16 else Qnn().recipe()
    network = Around(copy.deepcopy(inner)).eval()
    model = calibrated(network, X, config=config, target="qnn", example=X)
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    return model


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("pool", "kernel", "strides", "pads"),
    [
        # A kernel of 2 places does not compile on the oldest chips.
        (nn.AvgPool2d(2), [3, 3], [2, 2], [0, 0, 1, 1]),
        (nn.AvgPool2d(3, 1, 1), [3, 3], [1, 1], [1, 1, 1, 1]),
        (nn.AvgPool2d((5, 1), (1, 3)), [5, 3], [1, 3], [0, 1, 0, 1]),
        (nn.AvgPool2d(8), [8, 8], [2, 2], [0, 0, 0, 0]),
        # With an activation between the average and the places that stay.
        (
            nn.Sequential(nn.AvgPool2d(4), nn.ReLU()),
            *([4, 4], [2, 2], [0, 0, 0, 0]),
        ),
        (
            nn.Sequential(nn.AvgPool2d(5), nn.ReLU6()),
            *([5, 5], [1, 1], [0, 0, 0, 0]),
        ),
    ],
)
def test_an_average_is_a_convolution_that_computes_the_same_codes(
    pool: nn.Module,
    kernel: list[int],
    strides: list[int],
    pads: list[int],
    bits: int,
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.onnx"
    model = exported(pool, path, bits)
    graph = load_model(path)
    assert not nodes_of(graph, "AveragePool")
    (average,) = (n for n in nodes_of(graph, "Conv") if "/average" in str(n.name))
    actual = [
        list(attribute(average, key)) for key in ("kernel_shape", "strides", "pads")
    ]
    assert actual == [kernel, strides, pads]
    assert torchq.verify_onnx(model, path, [X], progress=False).ok


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AvgPool2d(5, ceil_mode=True),
        nn.AvgPool2d(13),
        nn.AvgPool2d(1, 2),
    ],
)
def test_other_windows_stay_averages(pool: nn.Module, tmp_path: Path) -> None:
    exported(pool, tmp_path / "m.onnx", 8)
    assert nodes_of(load_model(tmp_path / "m.onnx"), "AveragePool")


@pytest.mark.parametrize(
    ("inner", "bits", "changes"),
    [
        (lambda: Factors(1.0), 16, True),
        (lambda: Factors(1.0), 8, False),
        # Float16 does not hold such numbers.
        (lambda: Factors(1e-6), 8, True),
        (Normalised, 16, True),
        (Normalised, 8, False),
    ],
)
def test_numbers_of_channels_are_a_convolution_where_float16_is_too_coarse(
    inner: Callable[[], nn.Module], bits: int, changes: bool, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    model = exported(inner(), path, bits)
    graph = load_model(path)
    assert bool(nodes_of(graph, "Mul", "BatchNormalization")) is not changes
    assert torchq.verify_onnx(model, path, [X], progress=False).ok


def test_zeros_around_a_kernel_are_no_part_of_the_model(tmp_path: Path) -> None:
    """The file has 7 x 7 places for 5 x 5, and other numbers there than zeros are named."""
    path = tmp_path / "m.onnx"
    model = exported(by_channel(5, 2, 2), path, 16)
    graph = load_model(path)
    (layer,) = (n for n in nodes_of(graph, "Conv") if attribute(n, "group", 1) > 1)
    assert list(attribute(layer, "kernel_shape")) == [7, 7]
    assert list(attribute(layer, "pads")) == [3, 3, 3, 3]
    assert torchq.verify_onnx(model, path, [X], progress=False).ok
    stored = weight_nodes(graph)["inner.weight_quantizer"].inputs[0]
    codes = value_of(stored).clone()
    codes[0, 0, 0, 0] = 1
    replace_stored(stored, codes)
    save_model(graph, path)
    report = torchq.verify_onnx(model, path, [X], progress=False)
    assert not report.ok
    assert "has other numbers than zeros around its kernel" in str(report)


def test_a_bias_in_front_of_codes_has_one_dimension(tmp_path: Path) -> None:
    """The chip takes a product with scales for each channel together with such a bias alone."""
    path = tmp_path / "m.onnx"
    model = exported(LastChannels(), path, 8)
    (add,) = nodes_of(load_model(path), "Add")
    stored = [value for value in add.inputs if value.const_value is not None]
    assert [tuple(value.shape.numpy()) for value in stored] == [(_CHANNELS,)]
    assert torchq.verify_onnx(model, path, [X], progress=False).ok


def test_weights_that_functions_are_called_with_have_one_scale() -> None:
    """The chip takes several scales where a result is quantized, and those of calls are not."""
    plan = torchq.plan(Around(Called()).eval(), target="qnn", example=X)
    weights = {d.name: d.weight for d in plan.decisions if d.weight is not None}
    alone = [name for name, weight in weights.items() if weight.axis is None]
    assert alone == ["inner.layer"]


@pytest.mark.parametrize("bits", [8, 16])
def test_layers_behind_a_sigmoid_of_16_bits_read_its_codes_apart(
    bits: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    model = exported(nn.Sigmoid(), path, bits)
    assert len(nodes_of(load_model(path), "Clip")) == (bits == 16)
    assert torchq.verify_onnx(model, path, [X], progress=False).ok


# The result of a call stays float, which the export says.
@pytest.mark.filterwarnings("ignore:export_onnx")
@pytest.mark.parametrize(
    ("inner", "bits"),
    [
        (lambda: nn.AvgPool2d(4), 8),
        (lambda: nn.AvgPool2d(8), 16),
        (lambda: nn.Sequential(nn.AvgPool2d(4), nn.ReLU()), 8),
        (lambda: nn.Sequential(nn.AvgPool2d(5), nn.ReLU6()), 16),
        (lambda: Factors(1e-6), 8),
        (Normalised, 16),
        (lambda: by_channel(5, 2, 2), 16),
        (nn.Tanh, 16),
        (LastChannels, 8),
        (Called, 8),
    ],
)
def test_the_emulator_computes_what_the_simulation_does(
    inner: Callable[[], nn.Module], bits: int, tmp_path: Path
) -> None:
    """Each was seen beyond its bound, or the whole was far from the simulation, as it was."""
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    path = tmp_path / "m.onnx"
    model = exported(inner(), path, bits)
    report = torchq.verify_onnx(model, path, [X], target="qnn", progress=False)
    assert report.ok, str(report)


# The sums beside the layer stay float, which the export says.
@pytest.mark.filterwarnings("ignore:export_onnx")
def test_a_norm_is_not_joined_with_the_layer_behind_it(tmp_path: Path) -> None:
    """For a single image the emulator joined them, and the whole was 8 dB from the simulation."""
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, batch_first=True, activation="gelu", dropout=0.0
    )
    x = torch.randn(1, 16, 64)
    config = torchq.recipes.w8a16()
    model = calibrated(layer.eval(), x, config=config, target="qnn", example=x)
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    report = torchq.verify_onnx(model, path, [x], target="qnn", progress=False)
    assert report.ok, str(report)
    chip = {run.what: run for run in report.runs}["SM8550 (emulated)"]
    assert chip.simulation_db > 45


@pytest.mark.parametrize(
    ("ratio", "share"),
    [(1.0, 0.30), (2.0, 0.30), (1.37, 0.05)],
)
def test_means_that_lie_between_two_codes_have_a_bound_of_their_own(
    ratio: float, share: float, tmp_path: Path
) -> None:
    """The mean of four codes on one grid is a tie in one case of four."""
    path = tmp_path / "m.onnx"
    model = exported(nn.AvgPool2d(2), path, 8)
    before = model.inner.input_quantizer
    behind = model.last.input_quantizer
    behind.amax.copy_(before.amax * ratio)
    behind.amin.copy_(before.amin * ratio)
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    nodes = nodes_of(load_model(path), "QuantizeLinear")
    (quantize,) = (n for n in nodes if str(n.name).startswith("last.input_quantizer/"))
    assert Between.of(quantize).averages_at_ties() is (share > 0.05)
    assert bound_of(quantize, is_old=False).share == share
    assert torchq.verify_onnx(model, path, [X], progress=False).ok
