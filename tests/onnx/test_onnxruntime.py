"""Averages, groups, shuffles and regions of networks in files for ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, run_file
from tests.onnx.exported import exported as write
from torchq.onnx.ir import (
    attribute,
    bypass,
    load_model,
    nodes_of,
    replace_stored,
    save_model,
    value_of,
)
from torchq.onnx.qdq import stored_weight, write_record
from torchq.runtimes.onnxruntime.convolutions import merge_groups
from torchq.swap import plan_of

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

BOTH_EXPORTERS = [False, True]
IMAGES = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))


class Pooled(nn.Module):
    """A pooling between two convolutions, and a head."""

    def __init__(self, pool: nn.Module, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.pool = pool
        self.second = nn.Conv2d(channels, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.pool(self.first(x))).relu()
        return self.head(x.mean((2, 3)))


def averaged(model: nn.Module, path: Path, dynamo: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return write(model, IMAGES, path, dynamo=dynamo, dynamic_batch=dynamo)


def kinds(path: Path) -> list[str]:
    return [node.kind for node in torchq.inspect_onnx(path).integer]


@pytest.mark.parametrize("dynamo", BOTH_EXPORTERS)
def test_pooling_becomes_a_convolution(dynamo: bool, path: Path) -> None:
    model = averaged(Pooled(nn.AvgPool2d(2)), path, dynamo)
    assert not nodes_of(load_model(path), "AveragePool")
    assert kinds(path).count("QLinearConv") == 3
    assert "QLinearAveragePool" not in kinds(path)
    report = torchq.verify_onnx(model, path, [IMAGES, IMAGES.flip(2)], progress=False)
    assert report.ok
    assert min(output.sqnr_db for output in report.outputs) > 100


@pytest.mark.parametrize(
    ("pool", "left"),
    [
        (nn.AvgPool2d(3, stride=1, padding=1), 0),
        (nn.AvgPool2d((1, 3), stride=(2, 1), padding=(0, 1)), 0),
        (nn.AvgPool2d(5, stride=2, padding=2), 0),
        (nn.AvgPool2d(3, stride=2, ceil_mode=True, count_include_pad=False), 0),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), 1),
        (nn.AvgPool2d(2, ceil_mode=True), 1),
        (nn.AvgPool2d(4, stride=3, padding=1, ceil_mode=True), 1),
    ],
    ids=str,
)
def test_only_what_weights_cannot_express_stays_a_pooling(
    pool: nn.Module, left: int, path: Path
) -> None:
    model = averaged(Pooled(pool), path)
    assert len(nodes_of(load_model(path), "AveragePool")) == left
    assert torchq.verify_onnx(model, path, [IMAGES], progress=False).ok


@pytest.mark.eight_bit_products
def test_a_kernel_that_computes_something_else_is_found(path: Path) -> None:
    """The kernel of ONNX Runtime divides by the area of a whole window."""
    pooled = Pooled(nn.AvgPool2d(4, ceil_mode=True))
    for layer in (pooled.first, pooled.second, pooled.head):
        nn.init.zeros_(layer.bias)  # The result is to come from what is pooled.
    model = averaged(pooled, path)
    assert torchq.verify_onnx(model, path, [IMAGES], progress=False).ok
    file = load_model(path)
    (guard,) = nodes_of(file, "Max")
    bypass(guard)
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [IMAGES], progress=False)
    assert not report.ok and "the optimised file in onnxruntime" in str(report)
    assert report.first is not None and report.first.max_diff > 1
    write_record(file, target="openvino")
    save_model(file, path)
    assert torchq.verify_onnx(model, path, [IMAGES], progress=False).ok


class Grouped(nn.Module):
    """A convolution in groups between two others."""

    def __init__(self, groups: int, channels: int, per_output: int = 0) -> None:
        super().__init__()
        width = groups * channels
        out = groups * (per_output or channels)
        self.first = nn.Conv2d(3, width, 1)
        self.grouped = nn.Conv2d(width, out, 3, padding=1, groups=groups)
        self.last = nn.Conv2d(out, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.grouped(self.first(x).relu()).relu())


def exported(model: nn.Module, path: Path, target: str = "onnxruntime") -> Tensor:
    """Write a model for a target; return the example."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    write(model, x, path, target)
    return x


def groups_of(path: Path) -> tuple[int, list[int]]:
    """Return the groups and the shape of the weight of the second convolution."""
    _, node, *_ = nodes_of(load_model(path), "Conv")
    weight = stored_weight(node.inputs[1])
    assert weight is not None
    return attribute(node, "group", 1), list(value_of(weight.inputs[0]).shape)


@pytest.mark.parametrize(
    ("groups", "channels", "merged", "width"),
    [
        (26, 8, 2, 104),  # 13 groups become one: 2 would be 16 channels only
        (32, 4, 4, 32),
        (6, 8, 1, 48),
        (2, 40, 2, 40),  # wide enough
        (37, 8, 37, 8),  # all together would be too wide
        (4, 2, 1, 8),
        (16, 1, 16, 1),  # depthwise
    ],
)
def test_groups_get_at_least_32_channels(
    groups: int, channels: int, merged: int, width: int, path: Path
) -> None:
    exported(Grouped(groups, channels).eval(), path)
    assert groups_of(path) == (merged, [groups * channels, width, 3, 3])


@pytest.mark.parametrize("per_output", [4, 6])
def test_the_file_computes_the_same_codes(
    per_output: int, path: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.onnx"
    model = Grouped(8, 4, per_output).eval()
    x = exported(model, path)
    assert torchq.verify_onnx(model, path, [x, torch.randn(3, 3, 6, 6)]).ok
    file = load_model(path)
    assert merge_groups.undo(file) == {}
    save_model(file, plain)
    assert groups_of(plain) == (8, [8 * per_output, 4, 3, 3])
    assert torch.equal(run_file(path, x)[0], run_file(plain, x)[0])


def test_a_weight_between_groups_is_found(path: Path) -> None:
    model = Grouped(8, 4).eval()
    x = exported(model, path)
    file = load_model(path)
    weight = stored_weight(nodes_of(file, "Conv")[1].inputs[1])
    assert weight is not None
    codes = value_of(weight.inputs[0]).clone()
    codes[0, -1] = 1
    replace_stored(weight.inputs[0], codes)
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [x])
    assert [layer.name for layer in report.layers if layer.parameters] == [
        "grouped.weight_quantizer"
    ]


@pytest.mark.parametrize("groups", [0, 3, 64, "8", None])
def test_a_damaged_record_is_an_error_of_the_file(groups: object, path: Path) -> None:
    model = Grouped(8, 4).eval()
    x = exported(model, path)
    file = load_model(path)
    write_record(file, **{"merged groups": {"grouped.weight_quantizer": groups}})
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [x])
    assert not report.ok
    assert "grouped.weight_quantizer: has the shape (32, 32, 3, 3) in the file" in str(
        report
    )


def test_weights_with_a_zero_point_keep_their_groups(path: Path) -> None:
    """Additional weights of 0 would need the code of the zero point."""
    exported(Grouped(8, 4).eval(), path, "tensorrt")
    file = load_model(path)
    weight = stored_weight(nodes_of(file, "Conv")[1].inputs[1])
    assert weight is not None
    replace_stored(weight.inputs[2], value_of(weight.inputs[2]) + 1)
    merge_groups(file)
    assert [attribute(node, "group", 1) for node in nodes_of(file, "Conv")] == [1, 8, 1]


class Shuffled(nn.Module):
    """A unit of ShuffleNetV2, whose halves are concatenated, shuffled and read."""

    def __init__(self, read: Callable[[Tensor], list[Tensor]], groups: int = 2) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 6, 1)
        self.right = nn.Conv2d(3, 6, 1)
        self.near = nn.LazyConv2d(5, 1)
        self.far = nn.LazyConv2d(5, 1)
        self.read, self.groups = read, groups

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x).relu(), self.right(x).relu()], 1)
        n, c, h, w = x.shape
        x = (
            x.view(n, self.groups, c // self.groups, h, w)
            .transpose(1, 2)
            .reshape(n, c, h, w)
        )
        near, far = self.read(x)
        return self.near(near) + self.far(far)


def halves(x: Tensor) -> list[Tensor]:
    return list(x.chunk(2, 1))


def unequal(x: Tensor) -> list[Tensor]:
    return list(x.split([4, 8], 1))


def whole(x: Tensor) -> list[Tensor]:
    return [x, x]


#: Dimensions whose lengths are only known when the file runs.
OPEN: dict[str, dict[str, Any]] = {
    "none": {"dynamic_batch": False},
    "batch": {},
    "all": {"dynamic_shapes": {"x": {2: "height", 3: "width"}}},
}
#: With all lengths open, the exporter based on torch.export reads those of the input.
EXPORTS = [(name, False) for name in OPEN] + [
    (name, True) for name in ("none", "batch")
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("open_lengths", "dynamo"), EXPORTS)
@pytest.mark.parametrize(
    ("read", "groups", "gathers"), [(halves, 2, 2), (unequal, 3, 2), (whole, 4, 1)]
)
def test_a_shuffle_is_a_gather_for_each_part_that_is_read(
    read: Callable[[Tensor], list[Tensor]],
    groups: int,
    gathers: int,
    open_lengths: str,
    dynamo: bool,
    path: Path,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 4, 5)
    model = Shuffled(read, groups).eval()
    model(x)  # Makes the last layers.
    write(model, x, path, dynamo=dynamo, **OPEN[open_lengths])
    file = load_model(path)
    assert len(nodes_of(file, "Gather")) == gathers
    assert not nodes_of(file, "Transpose", "Reshape", "Slice", "Split")
    more = {"none": x, "batch": torch.randn(5, 3, 4, 5), "all": torch.randn(5, 3, 6, 3)}
    batches = [x, more[open_lengths]]
    assert torchq.verify_onnx(model, path, batches, progress=False).ok


class Unshuffled(nn.Module):
    """The same operators, which do not keep the height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        n, c, h, w = x.shape
        x = x.view(n, 2, 4, h, w).transpose(1, 2).reshape(n, c, w, h)
        return self.last(x)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("open_lengths", "dynamo"), EXPORTS)
def test_other_transpositions_stay(open_lengths: str, dynamo: bool, path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 6)
    model = write(Unshuffled(), x, path, dynamo=dynamo, **OPEN[open_lengths])
    file = load_model(path)
    assert not [
        node for node in nodes_of(file, "Gather") if node.attributes["axis"].value == 1
    ]
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


@pytest.mark.slow
def test_modules_that_were_traced_for_a_target_export(path: Path) -> None:
    """The concatenations of a DenseNet are found by a trace, which torch.export must not repeat."""
    densenet = pytest.importorskip("torchvision.models.densenet")
    x = torch.randn(2, 8, 6, 6)
    net = densenet._DenseBlock(2, 8, bn_size=2, growth_rate=4, drop_rate=0.0).eval()
    torchq.fuse_(net, x)
    write(net, x, path, dynamo=True)
    assert torchq.verify_onnx(net, path, [x]).ok


class Pyramid(nn.Module):
    """A concatenation of a convolution and of one on a smaller image that is resized."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.near = nn.Conv2d(3, 4, 1)
        self.far = nn.Conv2d(3, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 4, 1)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        far = nn.functional.interpolate(
            self.far(x).relu(), scale_factor=2, mode=self.mode
        )
        return self.last(torch.cat([self.near(x).relu(), far], 1)).mean((2, 3))


@pytest.mark.parametrize(
    ("mode", "convolutions"), [("nearest", 2), ("bilinear", 2), ("bicubic", 1)]
)
def test_resizing_keeps_tensors_from_being_negative(
    mode: str, convolutions: int, path: Path
) -> None:
    """Cubic interpolation does not, so the tensors that it is concatenated with get signed codes.

    Their ReLU and convolution then stay in float.
    """
    x = torch.randn(2, 3, 8, 8)
    net = calibrated(Pyramid(mode), x, target="onnxruntime")
    with pytest.warns(
        UserWarning,
        match=r"far: its output is not quantized.* put torchq\.nn\.QuantIdentity\(\) behind it",
    ):
        torchq.export_onnx(net, x, path, target="onnxruntime", dynamo=False)
    kinds = [node.kind for node in torchq.inspect_onnx(path).integer]
    assert kinds.count("QLinearConv") == convolutions
    # Without an example nothing says that the kernel of `near` rounds its bias.
    report = torchq.verify_onnx(net, path, [x])
    assert all(layer.max_diff <= 1 and not layer.parameters for layer in report.layers)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_with_an_example_resized_results_are_codes(mode: str, path: Path) -> None:
    """The convolution in front of the resizing quantizes its result, behind its ReLU."""
    x = torch.randn(2, 3, 8, 8)
    net = calibrated(Pyramid(mode), x, target="onnxruntime", example=x)
    torchq.export_onnx(net, x, path, target="onnxruntime", dynamo=False)
    counts = torchq.inspect_onnx(path).counts
    assert counts["QLinearConv"] == 3
    assert torchq.verify_onnx(net, path, [x, torch.randn(3, 3, 8, 8)]).ok


class Scaled(nn.Module):
    """A residual sum whose second operand is a convolution with constants behind it."""

    def __init__(self, constants: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.scaled = nn.Conv2d(8, 8, 3, padding=1)
        self.constants = constants
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x + self.constants(self.scaled(x)))


OFFSETS = torch.linspace(-1, 1, 8).view(1, 8, 1, 1)


def norm() -> nn.BatchNorm2d:
    result = nn.BatchNorm2d(8)
    generator = torch.Generator().manual_seed(1)
    result.running_var = torch.rand(8, generator=generator) + 0.3
    result.running_mean = torch.randn(8, generator=generator)
    return result.eval()


@pytest.mark.parametrize(
    "constants",
    [
        lambda x: 0.1 * x,
        lambda x: x + OFFSETS,
        lambda x: (0.3 * x).relu(),
        lambda x: 2 * x - 1,
        norm(),
    ],
    ids=["factor", "offset", "factor and activation", "factor and offset", "norm"],
)
@pytest.mark.filterwarnings("ignore:export_onnx. rules of onnxruntime:UserWarning")
def test_no_constant_is_folded_into_a_weight_that_is_then_quantized_anew(
    constants: Callable[[Tensor], Tensor], path: Path
) -> None:
    """ONNX Runtime folds constants into float weights, and quantizes the result by itself."""
    model = averaged(Scaled(constants), path)
    report = torchq.verify_onnx(model, path, [IMAGES, IMAGES.flip(2)], progress=False)
    assert report.ok, str(report)


class Upsampled(nn.Module):
    """A transposed convolution, which runs in float, of pooled codes and in front of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(nn.functional.max_pool2d(self.first(x).relu(), 2)))


def test_the_weight_of_a_float_convolution_between_codes_stays_as_it_is(
    path: Path,
) -> None:
    model = averaged(Upsampled(), path)
    report = torchq.verify_onnx(model, path, [IMAGES, IMAGES.flip(2)], progress=False)
    assert report.ok, str(report)


def test_what_a_hook_computes_stands_behind_its_layer(path: Path) -> None:
    """The simulation rounded as if the kernel of the layer gave the codes behind the hook."""
    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    layers[1].register_forward_hook(lambda module, args, result: result * 2 + 1)
    model = averaged(nn.Sequential(*layers), path)
    report = torchq.verify_onnx(model, path, [IMAGES, IMAGES.flip(2)], progress=False)
    assert report.ok, str(report)
    share = plan_of(model).share
    assert share is not None and report.coverage is not None
    assert share.quantized == pytest.approx(report.coverage.share)


class Padding(nn.Conv2d):
    """A convolution that pads by itself, as those of networks from TensorFlow."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, [0, 1, 0, 1])
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride)


class Standardized(nn.Conv2d):
    """A convolution whose weight is computed."""

    def forward(self, x: Tensor) -> Tensor:
        centered = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, centered, self.bias, self.stride)


class Lent(nn.Module):
    """A convolution whose weight and bias the forward around it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize(
    "first",
    [lambda: Padding(3, 8, 3), lambda: Standardized(3, 8, 3), Lent],
    ids=["own forward", "computed weight", "lent"],
)
def test_biases_of_calls_are_rounded_as_the_kernel_does(
    first: Callable[[], nn.Module], path: Path
) -> None:
    """Of so many codes, dozens fall to the other side with the bias as it was."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 48, 48)
    layers = nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    model = write(nn.Sequential(first(), *layers), images, path, dynamo=False)
    report = torchq.verify_onnx(model, path, [images], progress=False)
    assert report.ok, str(report)


class TokensOfImages(nn.Module):
    """A convolution whose result a linear layer reads, place by place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).flatten(2).transpose(1, 2))


def test_a_convolution_in_front_of_moved_codes_is_no_float_one(path: Path) -> None:
    """ONNX Runtime quantizes in front of moves itself, so an export has nothing to warn of."""
    x = torch.randn(2, 3, 8, 8)
    net = calibrated(TokensOfImages(), x, target="onnxruntime", example=x)
    torchq.export_onnx(net, x, path, dynamo=False)
    assert kinds(path).count("QLinearConv") == 1


class Weighted(nn.Module):
    """Results that are weighted by a softmax of codes, as split attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.scores = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        scores = self.scores(x.mean((2, 3), keepdim=True)).view(-1, 1, 2, 4)
        weights = scores.transpose(1, 2).softmax(1).reshape(-1, 8, 1, 1)
        return self.head(self.last(x * weights).mean((2, 3)))


def test_softmaxes_of_codes_are_computed_in_float(path: Path) -> None:
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    net = calibrated(Weighted(), x, target="onnxruntime", example=x[:1])
    torchq.export_onnx(net, x[:1], path, dynamo=False)
    assert torchq.verify_onnx(net, path, [x]).ok
    assert "QLinearSoftmax" not in kinds(path)


class PooledStates(nn.Module):
    """States, and a pool of them in another order, as Swin returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = self.norm(self.layer(x))
        return states, self.pool(states.transpose(1, 2))


@pytest.mark.parametrize("dynamo", BOTH_EXPORTERS)
def test_a_result_stays_float_beside_its_quantized_transpose(
    dynamo: bool, path: Path
) -> None:
    """A session returned the values of codes for it."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    net = calibrated(PooledStates(), x, target="onnxruntime", example=x[:1])
    torchq.export_onnx(net, x[:1], path, dynamo=dynamo)
    assert torchq.verify_onnx(net, path, [x]).ok
    states, _ = run_file(path, x, optimize=True)
    torch.testing.assert_close(torch.as_tensor(states), net(x)[0])


class Features(nn.Module):
    """A backbone that returns the features, which its head reads too."""

    def __init__(
        self, convolution: Callable[..., nn.Module], activation: nn.Module, before: bool
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.features = convolution(8, 8, 3)
        self.activation = activation
        self.head = nn.Conv2d(8, 4, 3)
        self.before = before

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sums = self.features(self.stem(x).relu())
        features = self.activation(sums)
        return sums if self.before else features, self.head(features)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(), nn.ReLU6()])
@pytest.mark.parametrize("convolution", [nn.Conv2d, nn.ConvTranspose2d])
def test_weights_of_a_convolution_whose_result_is_returned_stay_as_they_are(
    convolution: Callable[..., nn.Module],
    activation: nn.Module,
    before: bool,
    path: Path,
) -> None:
    """A session quantized weight and bias anew, with scales of its own."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 20, 20)
    net = Features(convolution, activation, before)
    config = torchq.recipes.int8(reduce_range=True)
    calibrated(net, x, config=config, target="onnxruntime", example=x[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Results are not quantized.
        torchq.export_onnx(net, x[:1], path, dynamo=False)
    assert torchq.verify_onnx(net, path, [x]).ok


class SharedBlock(nn.Module):
    """A convolution that others share, and one with ReLU."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x)).relu()


class SharedByBlocks(nn.Module):
    """One layer under three paths, which reads values of both signs, then those of a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.shared = nn.Conv2d(16, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(SharedBlock(self.shared) for _ in range(2)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:(?s).*its output is not quantized")
@pytest.mark.parametrize("dynamo", BOTH_EXPORTERS)
def test_every_call_of_a_layer_with_several_paths_reads_codes(
    dynamo: bool, path: Path
) -> None:
    """The file has the codes of its weight, and ONNX Runtime quantizes no other weight anew."""
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    net = calibrated(SharedByBlocks(), x, target="onnxruntime", example=x[:1])
    torchq.export_onnx(net, x[:1], path, dynamo=dynamo)
    weights = [node.inputs[1] for node in nodes_of(load_model(path), "Conv")]
    assert sum(stored_weight(weight) is not None for weight in weights) == 4
    report = torchq.verify_onnx(net, path, [x])
    assert report.ok, str(report)
    assert report.outputs[0].equal == 1
