"""Files for OpenVINO, as OpenVINO computes them: small nets with one pattern each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import calibrated, run_file
from torchq.onnx.ir import (
    computed_by,
    load_model,
    nodes_of,
    readers,
    replace_stored,
    save_model,
    value_of,
)
from torchq.onnx.qdq import quantizer_nodes, weight_nodes
from torchq.onnx.verify import verify
from torchq.runtimes.openvino import OpenVino

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")

#: The order of float sums alone: differences above 100 dB were seen for right results, and below
#: 20 dB for wrong ones. A code that falls the other way at a tie costs up to 60 dB.
ALIKE_DB = 40


class Net(nn.Module):
    """Two convolutions, ``pattern`` of their results, and a convolution that reads it."""

    def __init__(self, pattern: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.pattern = pattern
        self.last = nn.LazyConv2d(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pattern(self.left(x), self.right(x)))


def cat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], 1)


def shuffled(a: Tensor, b: Tensor) -> Tensor:
    return cat(a, b).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


PATTERNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "signed": cat,
    "signed with an offset": lambda a, b: cat(
        1.2 * a.relu() - 0.3, 1.1 * b.relu() - 0.2
    ),
    "one signed": lambda a, b: cat(a.relu(), b),
    "with ReLU": lambda a, b: cat(a, b).relu(),
    "unsigned": lambda a, b: cat(a.relu(), b.relu()),
    "with pooling": lambda a, b: F.max_pool2d(cat(a, b), 2),
    "shuffled": shuffled,
    "cut": lambda a, b: cat(a, b)[:, :12],
    "cut nowhere": lambda a, b: cat(a, b)[:, :16],
    "twice": lambda a, b: cat(cat(a, b), a),
    "added": lambda a, b: cat(a + b, b),
    "read by two": lambda a, b: cat(cat(a, b).relu(), cat(a, b)),
    "with average pooling": lambda a, b: F.avg_pool2d(cat(a, b), 2),
    "cut and ReLU": lambda a, b: cat(a, b)[:, 4:].relu(),
    "with a norm": lambda a, b: F.batch_norm(
        cat(a, b), torch.ones(16), torch.ones(16)
    ).relu(),
    "with a norm of two": lambda a, b: F.batch_norm(
        cat(cat(a, b), b), torch.ones(24), torch.ones(24)
    ),
    "with a norm and without": lambda a, b: cat(
        F.batch_norm(cat(a, b), torch.ones(16), torch.ones(16)).relu(), a
    ),
}


def quantized(model: nn.Module, x: Tensor, symmetric: bool | None = None) -> nn.Module:
    """Return a calibrated model with weights of 7 bits.

    No kernel overflows with these. OpenVINO's do for 8 bits on CPUs without VNNI. Without
    ``symmetric`` ranges have the form that the target wants.
    """
    config = torchq.recipes.int8(reduce_range=True, symmetric=symmetric)
    return calibrated(model, x, config=config, target="openvino", example=x)


def compiled(path: Path, x: Tensor) -> Tensor:
    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    model = core.read_model(str(path))
    model.reshape(list(x.shape))
    request = core.compile_model(model, "CPU", settings)
    return torch.from_numpy(request.create_infer_request().infer([x.numpy()])[0].copy())


def agreement(model: nn.Module, x: Tensor, path: Path, **options: Any) -> float:
    """Return in dB how well OpenVINO computes what the file of a calibrated model says."""
    torchq.export_onnx(model, x, path, target="openvino", dynamo=False, **options)
    return sqnr(
        compiled(path, x),
        torch.as_tensor(run_file(path, x)[0]),
    )


def net_agreement(
    pattern: Callable[[Tensor, Tensor], Tensor],
    path: Path,
    symmetric: bool | None = None,
) -> float:
    """Return the agreement of a :class:`Net` with random weights on a random image."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 10, 10)
    model = Net(pattern).eval()
    model(x)
    return agreement(quantized(model, x, symmetric), x, path)


#: Sums alone: above 130 dB each, and below 45 dB where both operands are quantized.
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two convolutions": lambda a, b: a + b,
    "with ReLU": lambda a, b: (a + b).relu(),
    "one behind ReLU": lambda a, b: a.relu() + b,
    "two in a row": lambda a, b: (a + b.relu()).relu() + b,
    "activations": lambda a, b: F.hardswish(a) + F.silu(b),
}
SUMS_ALIKE_DB = 100


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_rounded_as_in_the_file(name: str, path: Path) -> None:
    assert net_agreement(SUMS[name], path) > SUMS_ALIKE_DB


@pytest.mark.sample(7)
@pytest.mark.parametrize("symmetric", [None, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_concatenated_tensors_are_read_right(
    name: str, symmetric: bool | None, path: Path
) -> None:
    assert net_agreement(PATTERNS[name], path, symmetric) > ALIKE_DB


#: Results of reductions whose quantization OpenVINO would compute in the same kernel.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "largest": lambda a, b: a.amax((2, 3), keepdim=True) + b,
    "largest, halved": lambda a, b: 0.5 * a.amax((2, 3), keepdim=True) + b,
    "least": lambda a, b: a.amin((2, 3), keepdim=True) + b,
    "of channels": lambda a, b: cat(a.amax(1, keepdim=True), b.mean(1, keepdim=True)),
    "of rows": lambda a, b: (a.flatten(2).mean(1) + b.flatten(2).sum(1)).unflatten(
        1, (1, 10, 10)
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_results_of_reductions_are_quantized_right(name: str, path: Path) -> None:
    assert net_agreement(REDUCTIONS[name], path) > ALIKE_DB


class Tokens(nn.Module):
    """Two linear layers, ``pattern`` of their results, and a linear layer that reads it."""

    def __init__(self, pattern: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.last = nn.LazyLinear(8)
        self.pattern = pattern

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pattern(self.left(x), self.right(x)))


class Gelus(nn.Module):
    """A convolution and two linear layers that read GELU, whose values lie from -0.17 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.third = nn.Linear(16, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        return self.last(F.gelu(self.third(x.flatten(2).transpose(1, 2))))


def integer_layers(path: Path, x: Tensor) -> list[str]:
    """Return the precision of what the layers of a compiled file read, in no order."""
    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape(list(x.shape))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = {"Convolution", "FullyConnected", "MatMul"}
    rows = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    return [
        str(row["runtimePrecision"].value)
        for row in rows
        if str(row["layerType"].value) in kinds
    ]


def test_values_of_unequal_signs_have_a_zero_point_and_run_on_integers(
    path: Path,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 6, 6)
    model = quantized(Gelus().eval(), x)
    for layer in (model.second, model.third, model.last):
        assert layer.input_quantizer.descriptor.unsigned is True
        _, zero_point = layer.input_quantizer.calculate_qparams()
        # 0.17 of a range of a few units lies below 0.
        assert 0 < int(zero_point) < 128
    assert agreement(model, x, path) > ALIKE_DB
    with torch.no_grad():
        assert sqnr(compiled(path, x), model(x)) > ALIKE_DB
    assert integer_layers(path, x) == ["u8"] * 4


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of a sequence": lambda a, b: torch.cat([a[0], b[0]], 1),
    "of one sign": lambda a, b: torch.cat([a[0].relu(), b[0]], 1),
    "of images": cat,
    "of a batch": lambda a, b: torch.cat([a, b], 0),
    "moved around": lambda a, b: torch.roll(a, (1, 2), (1, 2)),
    "features": lambda a, b: torch.cat([a, b], -1),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", JOINED)
def test_products_read_joined_tokens(name: str, path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5, 16)
    model = Tokens(JOINED[name]).eval()
    model(x)
    model = quantized(model, x)
    assert agreement(model, x, path) > ALIKE_DB


class Masked(nn.Module):
    """Attention in the user's own words; some keys are masked by a sum with large numbers."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)
        self.mask = mask
        self.last = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 4
        return self.last((scores + self.mask((x[..., 0] > 0).float())).softmax(-1))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a billion": lambda kept: (1 - kept)[:, None, :] * -1e9,
    "moved behind": lambda kept: ((1 - kept) * -1e8)[:, None, :],
    "divided": lambda kept: (1 - kept)[:, None, :] / -1e-9,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_large_numbers_leave_the_scores_their_digits(
    name: str, path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    model = quantized(Masked(MASKS[name]).eval(), x)
    assert agreement(model, x, path) > ALIKE_DB


class Vanishing(nn.Module):
    """Branches that are added to codes of values up to 1e-6."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 8, 1)
        with torch.no_grad():
            self.first.weight.mul_(1e-6)
            for layer in self.children():
                layer.bias.mul_(1e-6)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = x + self.left(x)
        return self.last(total + self.right(total))


def test_sums_keep_codes_whose_values_vanish(path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 10, 10)
    assert agreement(quantized(Vanishing().eval(), x), x, path) > ALIKE_DB


class VanishingFactor(nn.Module):
    """A product of two results whose second factor has values up to 1e-7, and no symmetric ones."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.move = move
        self.last = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.right.weight.mul_(1e-8)
            self.right.bias.copy_(torch.linspace(0, 1e-7, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.left(x) @ self.move(self.right(x)))


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a result": lambda x: x,
    "turned": lambda x: x.transpose(-1, -2),
}


@pytest.mark.parametrize("name", FACTORS)
def test_products_keep_codes_whose_values_vanish(name: str, path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8)
    model = quantized(VanishingFactor(FACTORS[name]).eval(), x)
    assert agreement(model, x, path) > ALIKE_DB


class ReadTwice(nn.Module):
    """A layer without a bias whose result is quantized for two others, and returned in float."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.left = nn.Conv2d(8, 8, 1)
        self.right = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return self.left(x) + self.right(x), x


@pytest.mark.parametrize("groups", [1, 8])
def test_results_without_a_bias_are_quantized_beside_float(
    groups: int, path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 10, 10)
    first = nn.Conv2d(8, 8, 3, groups=groups, bias=False)
    model = quantized(ReadTwice(first).eval(), x)
    assert agreement(model, x, path) > ALIKE_DB
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


class AddedTo(nn.Module):
    """A layer without a bias, to whose result something made of it is added."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, bias=False)
        self.change = change
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last((x + self.change(x)).sigmoid())


#: Results of the layer, read beside the layer itself.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "its norm": nn.LayerNorm(8),
    "its sine": torch.sin,
    "where it is positive": torch.relu,
}


@pytest.mark.parametrize("name", CHANGES)
def test_results_without_a_bias_are_read_twice_with_an_open_batch(
    name: str, path: Path
) -> None:
    """OpenVINO multiplied one of both by the scale of the codes once more."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 10, 10)
    model = quantized(AddedTo(CHANGES[name]).eval(), x)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


@pytest.mark.filterwarnings("ignore:.*calibrated on zeros alone")
def test_biases_of_layers_with_equal_weights_are_the_model_s_own(path: Path) -> None:
    """They share their stored weight, as blocks do whose last norms are zero at first."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 1) for _ in range(4)]
    for layer in layers[1:3]:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.randn(2, 8, 10, 10)
    model = nn.Sequential(*layers).eval()
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, target="openvino", example=x, progress=False)
    torchq.calibrate(model, [x], correct=False, progress=False)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


class Positions(nn.Module):
    """A layer of a table of positions, whose result is added to that of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 8, 10, 10))
        self.position = nn.Conv2d(8, 8, 1)
        self.first = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.first(x) + self.position(self.table.sin())))


def test_layers_of_stored_tensors_alone_are_computed_right(path: Path) -> None:
    """OpenVINO computes them once, and the convolution of their codes wrongly."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 10, 10)
    model = quantized(Positions().eval(), x)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


#: Average pooling over padding that counts.
AVERAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padded": lambda a, b: F.avg_pool2d(a, 3, 1, 1) + b,
    "with steps": lambda a, b: F.avg_pool2d(a, 3, 2, 1),
    "of a concatenation": lambda a, b: F.avg_pool2d(cat(a, b), 3, 2, 1),
    "beside a layer": lambda a, b: cat(F.avg_pool2d(a, 3, 1, 1), a),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_padding_counts_as_zero_in_averages(name: str, path: Path) -> None:
    assert net_agreement(AVERAGES[name], path) > ALIKE_DB


def test_averages_of_codes_that_begin_at_zero_stay_as_they_are(path: Path) -> None:
    assert net_agreement(lambda a, b: F.avg_pool2d(a.relu(), 3, 1, 1), path) > ALIKE_DB
    assert not nodes_of(load_model(path), "Max")


class Pooled(nn.Module):
    """Max pooling of values that may be negative, and a concatenation behind another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.third = nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Conv2d(64, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.max_pool2d(F.leaky_relu(self.first(x)), 2))
        return self.last(torch.cat([x, F.leaky_relu(self.third(x))], 1))


def test_pooled_values_are_read_right_beside_a_concatenation(path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 20, 20)
    model = quantized(Pooled().eval(), x)
    assert agreement(model, x, path) > ALIKE_DB


@pytest.mark.parametrize("bias", [None, 0.0, -0.5])
@pytest.mark.parametrize("shape", [(2, 64), (2, 5, 64)])
def test_linear_layers_with_equal_biases_read_no_foreign_memory(
    bias: float | None, shape: tuple[int, ...], path: Path
) -> None:
    torch.manual_seed(0)
    first, last = (nn.Linear(64, width, bias=bias is not None) for width in (64, 16))
    if bias is not None:
        nn.init.constant_(first.bias, bias)
    x = torch.randn(shape)
    model = nn.Sequential(first, nn.ReLU(), last).eval()
    model = quantized(model, x)
    assert agreement(model, x, path, dynamic_batch=True) > ALIKE_DB


class Dense(nn.Module):
    """Two layers whose results are concatenated, and a norm or nothing in front of a third."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = norm
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), self.right(x)], 1)
        return self.last(self.norm(joined))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (nn.Identity(), "UINT8"),
        (nn.BatchNorm2d(16), "UINT8"),
        (nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()), "INT8"),
    ],
    ids=["nothing", "norm", "norm and ReLU"],
)
def test_concatenations_that_no_layer_reads_keep_signed_codes(
    norm: nn.Module, dtype: str, path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 10, 10)
    model = quantized(Dense(norm).eval(), x, symmetric=True)
    assert agreement(model, x, path) > ALIKE_DB
    (node,) = nodes_of(load_model(path), "Concat")
    pairs = [computed_by(value, "DequantizeLinear") for value in node.inputs]
    assert {pair.inputs[2].const_value.dtype.name for pair in pairs if pair} == {dtype}


class Attending(nn.Module):
    """Attention of tokens, whose number is open, so that a Concat joins the lengths of views."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            project(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
            for project in self.projections
        )
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2)
        return self.last(y.reshape(*x.shape[:2], 16))


def test_attention_of_open_length_multiplies_signed_codes(path: Path) -> None:
    """Those with a zero point go to float in front of the product."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    config = torchq.recipes.int8(reduce_range=True)
    model = calibrated(
        Attending().eval(), x, config=config, target="openvino", example=x
    )
    lengths = {"x": {1: "tokens"}}
    torchq.export_onnx(model, x, path, dynamic_shapes=lengths, progress=False)
    file = load_model(path)
    first, second = nodes_of(file, "MatMul")[-3:-1]
    kinds = []
    for product in (first, second):
        for value in product.inputs:
            pair = computed_by(value, "DequantizeLinear")
            kinds.append(pair.inputs[2].const_value.dtype.name)
    assert kinds == ["INT8", "INT8", "UINT8", "INT8"]
    compiled = openvino.Core().compile_model(path, "CPU")
    layers = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    products = [
        info["runtimePrecision"].value
        for info in layers
        if first.name in info["originalLayersNames"].value.split(",")
    ]
    assert products == ["i8"]


class Again(nn.Module):
    """A concatenation that is quantized by itself, and again by the convolution that reads it."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.own = torchq.nn.QuantIdentity()
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.own(cat(self.left(x), self.right(x)))))


@pytest.mark.sample(3)
@pytest.mark.eight_bit_products
@pytest.mark.parametrize("between", [torch.clone, torch.relu, lambda x: x[:, :16]])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pairs_in_a_row_behind_a_concatenation_are_kept_apart(
    symmetric: bool, between: Callable[[Tensor], Tensor], path: Path
) -> None:
    """OpenVINO ends the process otherwise. Two equal ones with nothing between them are one."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 10, 10)
    config = torchq.recipes.int8(reduce_range=True, symmetric=symmetric)
    model = calibrated(
        Again(between).eval(), x, config=config, target="openvino", example=x
    )
    torchq.export_onnx(model, x, path, target="openvino", dynamo=False)
    apart = nodes_of(load_model(path), "Max")
    behind = [user.op_type for node in apart for user in readers(node.outputs[0])]
    is_one = symmetric and between is torch.clone
    assert behind == ([] if is_one else ["QuantizeLinear"])
    assert sqnr(compiled(path, x), run_file(path, x)[0]) > ALIKE_DB
    assert torchq.verify_onnx(model, path, [x]).ok


class Mixed(nn.Module):
    """A convolution, a normalization and a linear layer of as many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1)))


def kernels(path: Path, shape: tuple[int, ...]) -> list[str]:
    """Return what computes the convolutions and products of a file for inputs of one shape."""
    core = openvino.Core()
    network = core.read_model(str(path))
    network.reshape(list(shape))
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    nodes = core.compile_model(network, "CPU", settings).get_runtime_model().get_ops()
    rows = [
        {name: v.astype(str) for name, v in node.get_rt_info().items()}
        for node in nodes
    ]
    layers = [
        row for row in rows if row["layerType"] in ("Convolution", "FullyConnected")
    ]
    return [row["primitiveType"].lower() for row in layers]


def test_layers_of_as_many_channels_compute_in_integers(path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 10, 10)
    model = quantized(Mixed().eval(), x)
    torchq.export_onnx(
        model, x, path, target="openvino", dynamo=False, dynamic_batch=True
    )
    actual = kernels(path, tuple(x.shape))
    assert len(actual) == 2
    assert all(kernel.endswith("i8") for kernel in actual), actual


def written_pooled(path: Path) -> tuple[nn.Module, Tensor]:
    """Write two layers with a pool between them; return the model and its input."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3)
    )
    config = torchq.recipes.int8(reduce_range=True)
    calibrated(model.eval(), x, config=config, target="openvino", example=x)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    return model, x


def test_what_is_compared_runs_the_kernels_of_a_session_of_the_users(
    path: Path,
) -> None:
    """Codes shown as results made the layer behind them read int8, whose kernels lose a bit."""
    model, x = written_pooled(path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, report.table()
    assert [verdict.ok for verdict in report.verdicts] == [True, True, True]
    # What ONNX Runtime would make of it is no fault, and nothing is advised for it.
    inspected = str(torchq.inspect_onnx(path))
    assert "a file for openvino; in ONNX Runtime " in inspected
    assert "target='onnxruntime'" not in inspected


def damaged_copy(path: Path, quantizer: str) -> Path:
    """Return a file with other codes in the first channel of a weight."""
    file = load_model(path, check=False)
    node = weight_nodes(file)[quantizer]
    codes = value_of(node.inputs[0]).clone()
    codes[0] = -codes[0]
    replace_stored(node.inputs[0], codes)
    copied = path.with_name("damaged.onnx")
    save_model(file, copied, check=False)
    return copied


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["", "0.weight_quantizer", "3.weight_quantizer"])
def test_a_session_whose_results_are_far_is_compared_layer_by_layer(
    damaged: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values at ties, amplified, are no fault; a layer that computes otherwise is, and is named."""
    model, x = written_pooled(path)
    written = load_model(path)
    quantizers = len(quantizer_nodes(written))
    results = len(written.graph.outputs)
    opened = OpenVino.opened

    def opened_by_a_user(self: OpenVino, file: Path) -> Any:
        shown = len(load_model(file, check=False).graph.outputs) - results
        if damaged and shown < quantizers:
            file = damaged_copy(file, damaged)
        return opened(self, file)

    monkeypatch.setattr(OpenVino, "opened", opened_by_a_user)
    far = "result 0 is 44.8 dB from that of the file as it is written"
    monkeypatch.setattr(verify, "unlike_written", lambda *_: far)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    (written_file, session, _) = report.verdicts
    assert written_file.ok
    assert session.ok is not bool(damaged)
    assert session.reason.startswith(f"{far}; ")
    first = {
        "": "every layer agrees",
        "0.weight_quantizer": "computed by 0 or behind",
        "3.weight_quantizer": "computed by 3 or behind",
    }
    assert first[damaged] in session.reason


@pytest.mark.parametrize("bias", [0.0, 3.7e-7, -0.25])
def test_equal_biases_are_the_model_s_own_in_a_file_that_keeps_them_apart(
    bias: float, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    nn.init.constant_(model[0].bias, bias)
    x = torch.randn(4, 16)
    config = torchq.recipes.int8(reduce_range=True)  # It overflows on no CPU.
    torchq.quantize_(model, config, target="openvino", example=x, progress=False)
    torchq.calibrate(model, [x], correct=False, progress=False)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
    file = load_model(path)
    (stored,) = (
        v for name, v in file.graph.initializers.items() if name.endswith("/bias")
    )
    numbers = value_of(stored).clone()
    assert len(numbers.unique()) == 2
    numbers[0] += 0.001
    replace_stored(stored, numbers)
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert not report.ok
    assert "0.bias: 1 of 16 differ" in str(report)


class Wise(nn.Module):
    """Depthwise convolutions: behind a ReLU, beside another reader, and behind a SiLU."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        kinds: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        convolution = kinds[dims - 1]
        self.first = convolution(4, 16, 1)
        self.alone = convolution(16, 16, 3, padding=1, groups=16)
        self.beside = convolution(16, 16, 3, padding=1, groups=16)
        self.signed = convolution(16, 16, 3, padding=1, groups=16)
        self.last = convolution(16, 8, 1)
        with torch.no_grad():
            # Channels of very different size.
            sizes = torch.logspace(-2, 2, 16)
            self.first.weight.mul_(sizes.view(-1, *[1] * (dims + 1)))
            self.first.bias.mul_(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alone(self.first(x).relu()).relu()
        x = self.beside(x) + x
        return self.last(self.signed(F.silu(x)))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_channels_of_depthwise_layers_have_ranges_of_their_own_on_integers(
    dims: int, path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, *[8] * dims)
    model = quantized(Wise(dims).eval(), x)
    by_channel = {
        name
        for name, layer in model.named_children()
        if layer.input_quantizer.descriptor.axis == (1,)
    }
    assert by_channel == {"alone"}
    assert model.alone.input_quantizer.amax.numel() == 16
    assert agreement(model, x, path) > ALIKE_DB
    with torch.no_grad():
        assert sqnr(compiled(path, x), model(x)) > ALIKE_DB
    # Those of three dimensions read signed codes.
    assert set(integer_layers(path, x)) <= {"u8", "i8"}
    assert len(integer_layers(path, x)) == 5


def test_ranges_of_channels_bring_results_nearer_to_float() -> None:
    torch.manual_seed(0)
    model = Wise().eval()
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        exact = model.alone(model.first(x).relu())
        by_target = {}
        for target in ("onnxruntime", "openvino"):
            copied = calibrated(copy.deepcopy(model), x, target=target, example=x)
            found = copied.alone(model.first(x).relu())
            # Each channel counts alike.
            noise = (found - exact).square().sum((0, 2, 3))
            by_target[target] = (noise / exact.square().sum((0, 2, 3))).mean()
    assert by_target["openvino"] < by_target["onnxruntime"] / 4


class BesidePixels(nn.Module):
    """The mean of four pixels beside these pixels, in one scale: a quarter of means are ties."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 4, 4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        joined = torch.cat([self.pool(x).flatten(2), x.flatten(2)], 2)
        return self.last(joined.transpose(1, 2))


def test_means_at_ties_may_have_either_code(path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 8, 8)
    model = quantized(BesidePixels().eval(), x)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, report


class ChannelFactors(nn.Module):
    """Factors of channels in front of what gives a tensor another number of dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Conv1d(3, 16, 4, 4) if kind == "1-d" else nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.BatchNorm2d(16)
        self.factors = nn.Parameter(
            torch.rand(16, *([1] * (1 + (kind != "1-d")))) + 0.5
        )
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.norm(x) if self.kind == "norm" else x * self.factors
        if self.kind == "1-d":
            return self.last(x.mean(-1))
        if self.kind == "tokens":
            return self.last(x.flatten(2).transpose(1, 2))
        return self.last(x.flatten(2).mean(-1))


@pytest.mark.parametrize("kind", ["mean", "norm", "1-d", "tokens"])
def test_channels_keep_their_factors_where_dimensions_change(
    kind: str, path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64) if kind == "1-d" else torch.randn(2, 3, 32, 32)
    model = ChannelFactors(kind).eval()
    model.norm.running_mean.uniform_(-0.2, 0.2)
    model.norm.running_var.uniform_(0.5, 1.5)
    model = quantized(model, x)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, report


def test_channels_that_were_zeros_in_calibration_take_the_range_of_the_others(
    path: Path,
) -> None:
    torch.manual_seed(0)
    model = Wise().eval()
    x = torch.rand(2, 4, 8, 8)
    x[:, 0] /= 2
    x[:, 1] = x[:, 1] / 2 + 0.5
    # A channel that is 0 where the first input is below the second.
    with torch.no_grad():
        model.first.weight[3] = torch.tensor([1.0, -1.0, 0.0, 0.0]).view(4, 1, 1)
        model.first.bias[3] = 0.0
    quantized(model, x)
    ranges = model.alone.input_quantizer.amax.flatten()
    assert ranges[3] == ranges.max()
    torchq.export_onnx(model, x, path, progress=False)
    report = torchq.verify_onnx(model, path, [x, x[:, [1, 0, 2, 3]]], progress=False)
    assert report.ok, report


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)], (2, 8, 9, 9)),
        ([nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512)], (64, 512)),
    ],
    ids=["convolution", "linear"],
)
def test_layers_in_front_of_a_batchnorm_run_on_integers(
    layers: list[nn.Module], shape: tuple[int, ...], path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    first, norm, last = layers
    model = nn.Sequential(first, norm, nn.ReLU(), last).eval()
    norm.running_var.uniform_(0.5, 2.0)  # type: ignore[operator]
    model = calibrated(
        model,
        x,
        config=torchq.recipes.int8(reduce_range=True),
        target="openvino",
        example=x,
    )
    with pytest.warns(UserWarning, match="computed on integers, with a factor"):
        report = torchq.export_onnx(model, x, path, progress=False)
    assert len(nodes_of(load_model(path), "BatchNormalization")) == 1
    assert integer_layers(path, x) == ["u8", "u8"]
    assert report.coverage.share == 1.0
