"""Strongly typed files for TensorRT: what they hold, and that the check of them can say no."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ConvNeXt, DenseNet, VisionTransformer
from torchvision.models.convnext import CNBlockConfig

import torchq
from benchmarks import cifar, scenes
from tests.models import StagedNet
from tests.onnx.exported import Residual, calibrated, run_file
from torchq.errors import ConfigError, ExportError
from torchq.onnx.ir import (
    Model,
    add_initializer,
    add_node,
    attribute,
    computed_by,
    data_type,
    load_model,
    nodes_of,
    onnx_ir,
    readers,
    replace_stored,
    save_model,
    set_attribute,
    value_of,
)
from torchq.onnx.qdq import qparams_of, quantizer_nodes, weight_nodes, write_record
from torchq.runtimes import TensorRt
from torchq.runtimes.tensorrt import check_file
from torchq.runtimes.tensorrt.check import NOT_RUN

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.filterwarnings("ignore:export_onnx.target='tensorrt'"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
LEAST = 2.0**-14
HALF = onnx_ir.DataType.FLOAT16


class StochasticDepth(nn.Module):
    """Drops branches in training, as torchvision's does."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Mobile(nn.Module):
    """An inverted residual with squeeze and excitation; both operands of its sum are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = StochasticDepth()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.wide = nn.Conv2d(16, 32, 1)
        self.each = nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.back = nn.Conv2d(32, 16, 1)
        self.down = nn.Conv2d(32, 8, 1)
        self.up = nn.Conv2d(8, 32, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu6(self.each(F.relu6(self.wide(x))))
        gate = self.up(self.down(F.adaptive_avg_pool2d(y, 1)).relu())
        x = x + self.drop(self.back(y * F.hardsigmoid(gate)))
        return self.head(F.hardswish(x).mean((2, 3)))


class Detector(nn.Module):
    """Two scales with SiLU, joined, and a head that weighs distances by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 16, 3, 2, 1)
        self.two = nn.Conv2d(16, 32, 3, 2, 1)
        self.join = nn.Conv2d(48, 16, 3, 1, 1)
        self.box = nn.Conv2d(16, 32, 1)
        self.register_buffer("places", torch.arange(8.0).reshape(1, 1, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.one(x))
        y = F.silu(self.two(x))
        z = F.silu(self.join(torch.cat([x, F.interpolate(y, scale_factor=2)], 1)))
        return (self.box(z).reshape(-1, 4, 8, 64).softmax(2) * self.places).sum(2) * 8


class Attention(nn.Module):
    """A block of a language model with a mask of the most negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16, eps=1e-12)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.wide = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)
        hidden = (1.0 - mask[:, None, :].to(x.dtype)) * torch.finfo(torch.float32).min
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 4 + hidden
        x = self.norm(x + self.out(scores.softmax(-1) @ self.v(x)))
        return self.norm(x + self.back(F.gelu(self.wide(x))))


class Patches(nn.Module):
    """A block of torch's own transformer on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.head = nn.Linear(16, 5)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


class Segmenter(nn.Module):
    """A U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Conv2d(3, 16, 3, 1, 1)
        self.deep = nn.Conv2d(16, 32, 3, 1, 1)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.top(x).relu()
        y = self.up(self.deep(F.max_pool2d(x, 2)).relu())
        return self.last(torch.cat([x, y], 1))


def densely_connected() -> nn.Module:
    return DenseNet(8, (2, 2), 16, num_classes=10)


def vision_transformer() -> nn.Module:
    return VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)


def modern_convolutions() -> nn.Module:
    return ConvNeXt(
        [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=10
    )


def images(size: int) -> tuple[Tensor]:
    return (torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)),)


IMAGES = images(16)
LARGER = images(32)
WORDS = (torch.arange(12).reshape(2, 6), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]]))
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "residual": (Residual, IMAGES),
    "residual with norms": (StagedNet, IMAGES),
    "dense": (densely_connected, LARGER),
    "mobile": (Mobile, IMAGES),
    "depthwise": (cifar.depthwise, LARGER),
    "detector": (Detector, IMAGES),
    "detector of boxes": (scenes.Detector, images(64)),
    "language": (Attention, WORDS),
    "vision transformer": (vision_transformer, LARGER),
    "patches": (Patches, IMAGES),
    "modern convolutions": (modern_convolutions, LARGER),
    "u-net": (Segmenter, IMAGES),
}
#: Why some of them have nodes in float32: an untrained MobileNet ends in next to nothing.
KEPT = {"language": "the stored number 3.4e+38", "depthwise": "a range of"}


def written(
    model: nn.Module, example: Any, path: Path, target: Any = "tensorrt", **options: Any
) -> Any:
    """Quantize, calibrate and export a model; the report."""
    torchq.quantize_(model.eval(), target=target, example=example)
    torchq.calibrate(model, [example], progress=False)
    options = {"dynamo": False, "target": target, "progress": False, **options}
    return torchq.export_onnx(model, example, path, **options)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "float16") for name in NETWORKS),
        *((name, "float32") for name in ("residual", "detector", "language")),
    ],
)
def test_files_are_strongly_typed_and_have_the_codes_of_the_model(
    name: str, precision: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, example = NETWORKS[name]
    model = make().eval()
    path = tmp_path / "m.onnx"
    torchq.fuse_(model, example)
    written(model, example, path, TensorRt(precision=precision))
    actual = check_file(path)
    assert actual.ok, str(actual)
    assert (actual.precision, actual.not_run) == (precision, NOT_RUN)
    reasons = KEPT if precision == "float16" else {}
    assert bool(actual.kept) == (name in reasons)
    assert reasons.get(name, "") in str(actual.kept)
    proof = torchq.verify_onnx(model, path, [example], progress=False)
    assert proof.ok, proof.table()
    graph = load_model(path)
    assert {value.dtype.name for value in graph.graph.outputs} == {"FLOAT"}
    floats = {data_type(v).name for v in graph.graph.initializers.values()} - {
        "INT64",
        "INT8",
    }
    assert (
        floats <= {"FLOAT16", "FLOAT"}
        if precision == "float16"
        else floats == {"FLOAT"}
    )


class Functional(nn.Module):
    """Attention by the function of torch, with a mask of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)
        is_read = mask[:, None, :].bool()
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_read)
        return self.out(y)


@pytest.mark.parametrize(
    ("make", "example", "softmax"),
    [
        (Functional, WORDS, "quant_attention.softmax_quantizer"),
        (Patches, IMAGES, "block.self_attn.softmax_quantizer"),
        (Attention, WORDS, "quant_matmul_1.input_quantizer"),
    ],
)
def test_both_products_of_attention_read_signed_codes(
    make: Callable[[], nn.Module], example: Any, softmax: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    plan = torchq.plan(model, target="tensorrt", example=example)
    path = tmp_path / "m.onnx"
    report = written(model, example, path)
    assert not any("TensorRT takes int8" in text for text in report.warnings)
    descriptor = model.get_submodule(softmax).descriptor
    assert (descriptor.unsigned, descriptor.symmetric) == (False, True)
    assert torchq.swap.Plan.from_dict(plan.to_dict()) == plan
    assert plan.share is not None and plan.share.quantized == 1
    graph = load_model(path)
    products = [node for node in graph.graph if node.op_type == "MatMul"]
    operands = [computed_by(value) for node in products for value in node.inputs]
    assert {node and node.op_type for node in operands} == {"DequantizeLinear"}
    # No operand of those of attention is stored.
    from_runs = [
        all(node is not None and computed_by(node.inputs[0]) for node in pair)
        for pair in zip(operands[::2], operands[1::2], strict=True)
    ]
    assert sum(from_runs) == 2
    proof = torchq.verify_onnx(model, path, [example], progress=False)
    assert proof.ok, proof.table()


def widened(model: Model) -> Model:
    """Let a bfloat16 file compute in float32 on the numbers that it stores."""
    for value in list(model.graph.initializers.values()):
        if data_type(value).name == "BFLOAT16":
            replace_stored(value, value_of(value).float())
    for node in model.graph:
        if (
            node.op_type == "Cast"
            and attribute(node, "to") == onnx_ir.DataType.BFLOAT16
        ):
            set_attribute(node, "to", int(onnx_ir.DataType.FLOAT))
        for value in node.outputs:
            if value.type is not None and value.dtype.name == "BFLOAT16":
                value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    write_record(model, precision="float32")
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["residual", "detector", "language"])
def test_what_bfloat16_files_store_gives_the_codes_of_the_model(
    name: str, tmp_path: Path
) -> None:
    """ONNX Runtime has no kernels of this type for CPUs, so nothing rounds between operators.

    The weights are bfloat16 numbers, so that only the stored scales and constants can differ.
    """
    torch.manual_seed(0)
    make, example = NETWORKS[name]
    target = TensorRt(precision="bfloat16")
    path = tmp_path / "m.onnx"
    model = make().eval().bfloat16().float()
    torchq.quantize_(model, target=target, example=example)
    torchq.calibrate(model, [example], correct=False, progress=False)
    options: dict[str, Any] = {"target": target, "dynamo": False, "opset": 22}
    torchq.export_onnx(model, example, path, progress=False, **options)
    actual = check_file(path)
    graph = load_model(path)
    assert actual.ok and actual.precision == "bfloat16", str(actual)
    kinds = {data_type(v).name for v in graph.graph.initializers.values()}
    assert "BFLOAT16" in kinds
    assert bool(actual.kept) == (name == "language")
    save_model(widened(graph), path)
    proof = torchq.verify_onnx(model, path, [example], progress=False)
    assert proof.ok, proof.table()


def test_scales_are_numbers_of_the_type_in_plan_file_and_loaded_model(
    tmp_path: Path,
) -> None:
    """Nearly dead filters get the smallest normal number, and codes of 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
    )
    x = torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        model[2].weight[1] *= 1e-6
    report = written(model, x, tmp_path / "m.onnx")
    quantizer = model[2].weight_quantizer
    assert quantizer.descriptor.scale_format == "float16"
    assert float(quantizer.scale.flatten()[1]) == LEAST
    assert (
        torch.count_nonzero(quantizer(model[2].weight[1:2].expand(8, -1, -1, -1))[1])
        == 0
    )
    nodes = {**quantizer_nodes(load_model(tmp_path / "m.onnx"))}
    nodes |= weight_nodes(load_model(tmp_path / "m.onnx"))
    for name, node in nodes.items():
        scale = qparams_of(node).scale
        own = model.get_submodule(name).scale.flatten()
        assert torch.equal(scale.flatten(), own)
        assert torch.equal(own.half().float(), own)
        assert value_of(node.inputs[1]).dtype is (
            torch.float32 if name == "0.input_quantizer" else torch.float16
        )
    assert set(report.weights) <= set(nodes)
    torchq.save(model, tmp_path / "m.pt")
    twin = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    torchq.load(twin, tmp_path / "m.pt")
    assert torch.equal(twin(x), model(x))
    assert twin[2].weight_quantizer.descriptor == quantizer.descriptor


def test_learned_ranges_have_gradients_through_rounded_scales() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    x = torch.randn(2, 8, 9, 9)
    torchq.quantize_(model, target="tensorrt")
    torchq.calibrate(model, [x], progress=False)
    torchq.qat.learn_ranges_(model)
    model(x).square().sum().backward()
    amax = model[0].input_quantizer.amax
    assert amax.grad is not None
    assert float(amax.grad.abs()) > 0
    scale = model[0].input_quantizer.scale
    assert torch.equal(scale.half().float(), scale)


class Overflowing(nn.Module):
    """Squares and factors that float16 cannot hold, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3)
        self.second = nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = 600 * self.first(x)
        x = x / torch.sqrt((x * x).mean((2, 3), keepdim=True) + 1e-8)
        return self.second(torch.tanh(x * 1e6 / 1e6))


def test_what_overflows_stays_in_float32_with_its_readers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Overflowing()
    path = tmp_path / "m.onnx"
    x = torch.randn(2, 8, 12, 12)
    report = written(model, x, path)
    actual = check_file(path)
    assert actual.ok, str(actual)
    kept = {
        node.op_type: node
        for node in load_model(path).graph
        if node.name in actual.kept
    }
    assert {"Mul", "ReduceMean", "Add", "Sqrt", "Div"} <= set(kept)
    assert not {"Conv", "Tanh"} & set(kept) or "Conv" not in kept
    casts = nodes_of(load_model(path), "Cast")
    assert all(computed_by(n.inputs[0], "DequantizeLinear") is None for n in casts)
    assert f"{len(actual.kept)} nodes kept in float32" in str(report)
    assert any("a range of" in why for why in actual.kept.values())
    assert any("the stored number 1e+06" in why for why in actual.kept.values())
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


class Buckets(nn.Module):
    """Distances in buckets that grow, as those of relative positions in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, distances: Tensor) -> Tensor:
        buckets = (distances.float() / 4).log() / math.log(32) * 40
        return self.last(self.table(buckets.clamp(0, 63).long()))


def test_what_is_cut_to_whole_numbers_stays_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Buckets()
    path = tmp_path / "m.onnx"
    distances = torch.arange(4, 128).view(2, -1)
    written(model, distances, path)
    kept = check_file(path).kept.values()
    assert any(where.startswith("Log") and "whole numbers" in where for where in kept)
    assert torchq.verify_onnx(model, path, [distances], progress=False).ok


def test_what_overflows_may_have_an_input_that_is_left_out(tmp_path: Path) -> None:
    """A resize has one between its input and its factors."""
    layers = nn.Conv2d(8, 8, 3), nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1e6)
    path = tmp_path / "m.onnx"
    written(model, torch.randn(2, 8, 12, 12), path)
    assert any(where.startswith("Resize") for where in check_file(path).kept.values())


def test_the_report_tells_how_to_build_an_engine_and_what_was_not_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.onnx"
    message = str(written(Residual(), IMAGES, path))
    assert f"trtexec --onnx={path} --saveEngine=m.engine --stronglyTyped" in message
    assert "TensorRT 11: the same without --stronglyTyped" in message
    assert NOT_RUN in message
    assert any(
        "not run" in limit for limit in torchq.runtimes.RUNTIMES["tensorrt"].limits
    )


# --- the check says no ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tensorrt") / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written(Residual(), IMAGES, path)
    return path


def cast(model: Model, node: Any, index: int, kind: str) -> Any:
    """Put a Cast in front of an input of a node."""
    value = node.inputs[index]
    dtype = onnx_ir.DataType[kind]
    new = add_node(
        value.producer(), "Cast", [value], f"{value.name}/{kind}", {"to": dtype.value}
    )
    node.replace_input_with(index, new)
    return new.producer()


def cast_behind_a_pair(model: Model) -> None:
    conv = nodes_of(model, "Conv")[2]
    cast(model, cast(model, conv, 0, "FLOAT"), 0, "FLOAT16")
    cast(model, conv, 0, "FLOAT16")


def single(model: Model, node: Any) -> None:
    """Let a node that the record does not name compute in float32."""
    cast(model, node, 0, "FLOAT")
    for user in readers(node.outputs[0]):
        cast(model, user, 0, "FLOAT16")


def one_node_in_float32(model: Model) -> None:
    single(model, nodes_of(model, "Relu")[0])


def casts_between_nodes_in_float32(model: Model) -> None:
    nodes = nodes_of(model, "Relu", "MaxPool")[:2]
    for node in nodes:
        single(model, node)
    write_record(model, kept={node.name: "a range" for node in nodes})


def cast_of_a_stored_tensor(model: Model) -> None:
    conv = nodes_of(model, "Conv")[1]
    bias = add_initializer(model.graph, "bias", value_of(conv.inputs[2]).float())
    new = add_node(
        conv.inputs[0].producer(), "Cast", [bias], "short", {"to": int(HALF)}
    )
    conv.replace_input_with(2, new)


def cast_to_the_same_type(model: Model) -> None:
    cast(model, nodes_of(model, "MaxPool")[0], 0, "FLOAT16")


def float32_scale(model: Model, pair: Any) -> None:
    name = f"{pair.inputs[1].name}/single"
    numbers = value_of(pair.inputs[1]).float()
    pair.replace_input_with(1, add_initializer(model.graph, name, numbers))


def float32_scale_of_a_weight(model: Model) -> None:
    float32_scale(model, [*weight_nodes(model).values()][1])


def float32_scale_of_a_quantizer(model: Model) -> None:
    float32_scale(model, [*quantizer_nodes(model).values()][2])


def changed_scale(model: Model, number: float) -> None:
    scale = [*weight_nodes(model).values()][1].inputs[1]
    numbers = value_of(scale)
    numbers[0] = number
    replace_stored(scale, numbers)


def scale_below_normal_numbers(model: Model) -> None:
    changed_scale(model, 2.0**-20)


def infinite_scale(model: Model) -> None:
    changed_scale(model, torch.inf)


def two_scales_in_one_pair(model: Model) -> None:
    quantize = [*quantizer_nodes(model).values()][2]
    other = add_initializer(model.graph, "other", value_of(quantize.inputs[1]) * 1.01)
    quantize.replace_input_with(1, other)


def overflowing_constant(model: Model) -> None:
    bias = nodes_of(model, "Conv")[1].inputs[2]
    replace_stored(bias, (value_of(bias).float() + 1e6).half())


def no_pair_on_a_residual_input(model: Model) -> None:
    add = nodes_of(model, "Add")[0]
    for index, value in enumerate(add.inputs):
        pair = computed_by(value, "DequantizeLinear")
        if pair is not None:
            add.replace_input_with(index, pair.inputs[0].producer().inputs[0])


DAMAGE: dict[Callable[[Model], None], tuple[str, ...]] = {
    cast_behind_a_pair: ("a Cast stands between a DequantizeLinear and",),
    one_node_in_float32: (
        "Relu: computes in FLOAT, and the record of the file has no reason",
        "a Cast to float32 in front of .*, which is not kept",
        "a Cast from float32 behind .*, which is not kept",
    ),
    casts_between_nodes_in_float32: ("a Cast stands between two nodes in float32",),
    cast_of_a_stored_tensor: ("a Cast reads a stored tensor; store it in the type",),
    cast_to_the_same_type: ("a Cast changes nothing",),
    float32_scale_of_a_weight: (
        "DequantizeLinear has FLOAT scales in front of .*, which computes in FLOAT16",
        "reads FLOAT and FLOAT16; Conv takes one type",
    ),
    float32_scale_of_a_quantizer: (
        "QuantizeLinear has FLOAT scales for a FLOAT16 tensor",
    ),
    scale_below_normal_numbers: (
        "has scales from 9.54e-07 to .*, no normal FLOAT16 numbers",
    ),
    infinite_scale: ("has scales from .* to inf, no normal FLOAT16 numbers",),
    two_scales_in_one_pair: ("and its DequantizeLinear have different scales",),
    overflowing_constant: ("holds numbers that FLOAT16 cannot, read by",),
    no_pair_on_a_residual_input: (
        "TensorRT fuses an addition whose identity branch is quantized",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_the_check_says_no_to_a_damaged_file(
    damage: Callable[[Model], None], residual: Path, tmp_path: Path
) -> None:
    assert check_file(residual).ok
    model = load_model(residual)
    damage(model)
    save_model(model, tmp_path / "m.onnx", check=False)
    actual = check_file(tmp_path / "m.onnx")
    for message in DAMAGE[damage]:
        assert any(re.search(message, problem) for problem in actual.problems), str(
            actual
        )


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose numbers around the pairs are float32."""
    path = tmp_path_factory.mktemp("float32") / "m.onnx"
    written(small(), X, path, TensorRt(precision="float32"))
    return path


@pytest.mark.parametrize("number", [0.0, -1.0, torch.inf, torch.nan])
def test_scales_of_float32_files_are_looked_at_too(
    number: float, in_float32: Path, tmp_path: Path
) -> None:
    """They passed whatever they were: the check looked at half precision alone."""
    assert check_file(in_float32).ok
    model = load_model(in_float32)
    changed_scale(model, number)
    save_model(model, tmp_path / "m.onnx", check=False)
    actual = check_file(tmp_path / "m.onnx")
    assert any("no normal FLOAT numbers" in problem for problem in actual.problems), (
        str(actual)
    )


@pytest.mark.parametrize("change", [{"kept": 3}, {"precision": 7}, {"kept": {"a": 1}}])
def test_a_damaged_record_is_an_error_with_the_path(
    change: dict[str, Any], residual: Path, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    file = onnx.load(residual)
    for entry in file.metadata_props:
        if entry.key == "torchq":
            entry.value = json.dumps({**json.loads(entry.value), **change})
    onnx.save(file, tmp_path / "m.onnx")
    with pytest.raises(
        ExportError, match=r"m\.onnx: its record has .*The file is damaged"
    ):
        check_file(tmp_path / "m.onnx")


# --- settings and refusals ------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
    )


X = torch.randn(2, 16, 9, 9, generator=torch.Generator().manual_seed(0))


def test_float32_scales_and_typed_inputs(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = small()
    written(model, X, path, TensorRt(precision="float32"))
    assert model[0].weight_quantizer.descriptor.scale_format is None
    torchq.export_onnx(calibrated(small(), X), X, path, dynamo=False)
    with pytest.raises(
        ExportError, match=r"m\.onnx: was not written for TensorRT; expected a"
    ):
        check_file(path)
    model = small()
    written(model, X, path, TensorRt(typed_io=True))
    graph = load_model(path).graph
    assert {v.dtype.name for v in (*graph.inputs, *graph.outputs)} == {"FLOAT16"}
    assert not nodes_of(load_model(path), "Cast")
    assert check_file(path).ok
    assert (run_file(path, X.half())[0].float() - model(X)).abs().max() < 0.01
    with pytest.raises(
        ConfigError, match="got precision 'int8'; expected one of 'float16'"
    ):
        TensorRt(precision="int8")


def test_what_cannot_be_typed_is_refused_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(
        ExportError, match="opset 17 has no scales in float16; expected 19"
    ):
        written(small(), X, path, opset=17)
    model = small()
    with torch.no_grad():
        model[2].weight[3] *= 1e-6
    model = calibrated(model, X)
    with pytest.raises(
        ExportError,
        match=r"2\.weight_quantizer: has scales from .*, and float16 holds 6.1e-05",
    ):
        torchq.export_onnx(model, X, path, target="tensorrt", dynamo=False)
    assert not path.exists()


class Branching(nn.Module):
    """Behind a layer a branch that a file holds as one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3)

        def doubled(x: Tensor) -> Tensor:
            if bool(x.sum() > 0):
                x = x * 2
            return x

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
            self.branch = torch.jit.script(doubled)

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(self.conv(x))


class Widths(nn.Module):
    """Two layers, each of a short type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16).half()
        self.second = nn.Linear(16, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.half()).bfloat16()).float()


@pytest.mark.parametrize(
    ("model", "x", "text"),
    [
        (Branching, X, r"is a loop or branch \(If\); expected none"),
        (
            Widths,
            torch.randn(4, 16),
            "computes in float16 and in bfloat16; expected one",
        ),
    ],
)
def test_types_that_cannot_be_given_are_refused(
    model: Callable[[], nn.Module], x: Tensor, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(ExportError, match=text):
        written(model(), x, path)
    assert not path.exists()


def test_scales_of_a_model_for_no_target_are_rounded_with_a_warning(
    tmp_path: Path,
) -> None:
    model = calibrated(small(), X)
    report = torchq.export_onnx(
        model, X, tmp_path / "m.onnx", target="tensorrt", dynamo=False
    )
    (message,) = [
        message for message in report.warnings if "float16 numbers" in message
    ]
    assert message.startswith("0.input_quantizer, ")
    assert "quantize_ with target='tensorrt'" in message
    assert check_file(tmp_path / "m.onnx").ok


def test_deploy_runs_the_file_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the provider for CPUs."""
    monkeypatch.setattr(TensorRt, "execution_provider", "CPUExecutionProvider")
    model = small().eval()
    torchq.quantize_(model, target="tensorrt", example=X)
    torchq.calibrate(model, [X], progress=False)
    deployed = torchq.deploy(model, X, target="tensorrt", progress=False)
    assert deployed.target == "tensorrt"
    assert deployed.settings.precision == "float32"
    assert (deployed(X) - model(X)).abs().max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_precision_of_a_plan_is_that_of_its_files(
    precision: str, tmp_path: Path
) -> None:
    """A model that was quantized for float32 was written in float16."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 8, 8)

    def net() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)
        ).eval()

    model = net()
    torchq.quantize_(
        model, target=TensorRt(precision=precision), example=x, progress=False
    )
    torchq.calibrate(model, [x], progress=False)
    torchq.save(model, tmp_path / "m.pt")
    for one in (model, copy.deepcopy(model), torchq.load(net(), tmp_path / "m.pt")):
        torchq.export_onnx(one, x, tmp_path / "m.onnx", progress=False)
        assert check_file(tmp_path / "m.onnx").precision == precision
    content = torch.load(tmp_path / "m.pt")
    assert content["torchq"].get("settings", {}) == (
        {} if precision == "float16" else {"precision": precision}
    )
    content["torchq"]["settings"] = {"precision": "float3"}
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(
        ConfigError, match=r"load: settings: got {'precision': 'float3'}"
    ):
        torchq.load(net(), tmp_path / "m.pt")
    torchq.restore_(model)
    assert torchq.plan(model).settings == {}
