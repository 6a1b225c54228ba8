"""Matrix products, attention and recurrent layers in files."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, ends, graph_of, run_file
from torchq import QuantDescriptor, Rule
from torchq.errors import ExportError
from torchq.onnx.ir import nodes_of, save_model, value_of
from torchq.onnx.passes.constants import fold_shapes, known_shapes
from torchq.workflow import quantizers

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

EXPORTERS = [False, True]
SHAPES = [(2, 16), (2, 5, 16)]


class Perceptron(nn.Module):
    """Two linear layers with an activation between, and one with the same input and bias."""

    def __init__(self, activation: Any, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias)
        self.down = nn.Linear(32, 16, bias)
        self.side = nn.Linear(32, 16, bias)
        self.side.bias = self.down.bias
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.activation(self.up(x))
        return x + self.down(y), self.side(y)


def optimized(path: Path, open_dims: dict[str, int] | None = None) -> Counter[str]:
    """The operators of the graph that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 3
    for name, length in (open_dims or {}).items():
        options.add_free_dimension_override_by_name(name, length)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(
        node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize(
    ("dynamic", "bias"), [(False, True), (True, True), (True, False)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_linear_layers_stay_integer_products(
    shape: tuple[int, ...], bias: bool, dynamic: bool, dynamo: bool, path: Path
) -> None:
    x = torch.randn(shape)
    model = calibrated(Perceptron(F.gelu, bias), x, target="onnxruntime")
    torchq.export_onnx(
        model, x, path, target="onnxruntime", dynamo=dynamo, dynamic_batch=dynamic
    )
    found = optimized(path)
    assert (
        found["MatMulIntegerToFloat"],
        found["Gemm"],
        found["MatMul"],
        found["DequantizeLinear"],
    ) == (3, 0, 0, 0), found
    if dynamic:
        assert optimized(path, {"batch": 2})["Gemm"] == 0
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok, str(report)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_files_without_a_target_do_too(dynamo: bool, path: Path) -> None:
    x = torch.randn(2, 5, 16)
    model = calibrated(nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)), x)
    torchq.export_onnx(model, x, path, dynamo=dynamo, dynamic_batch=False)
    found = optimized(path)
    assert (
        found["MatMulIntegerToFloat"],
        found["Gemm"],
        found["DequantizeLinear"],
    ) == (2, 0, 0), found


def test_a_sum_that_is_quantized_at_once_stays_a_gemm(path: Path) -> None:
    x = torch.randn(2, 5, 16)
    model = calibrated(
        nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), x, target="onnxruntime"
    )
    torchq.export_onnx(
        model, x, path, target="onnxruntime", dynamo=False, dynamic_batch=False
    )
    found = optimized(path)
    assert (
        found["QGemm"],
        found["MatMulIntegerToFloat"],
        found["DequantizeLinear"],
    ) == (1, 1, 0)
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_inspection_names_float_products_of_static_shapes(
    shape: tuple[int, ...], path: Path
) -> None:
    stored = {
        "s": torch.tensor(0.1),
        "z": torch.tensor(0, dtype=torch.int8),
        "w": torch.randint(-127, 128, (16, 4), dtype=torch.int8),
        "b": torch.randn(4),
    }
    model = graph_of(
        ("QuantizeLinear", ["x", "s", "z"], ["q"], {}),
        ("DequantizeLinear", ["q", "s", "z"], ["d"], {}),
        *(("DequantizeLinear", ["w", "s", "z"], [f"v{i}"], {}) for i in (0, 1)),
        *(("MatMul", ["d", f"v{i}"], [f"p{i}"], {}) for i in (0, 1)),
        ("Add", ["p0", "b"], ["y0"], {}),
        ("Add", ["b", "p1"], ["y1"], {}),
        stored=stored,
        shape=shape,
        outputs=dict.fromkeys(("y0", "y1"), (*shape[:-1], 4)),
    )
    save_model(model, path)
    assert optimized(path)["Gemm"] == 2
    fallbacks = torchq.inspect_onnx(path).fallbacks
    assert [node.kind for node in fallbacks] == ["Gemm", "Gemm"]
    assert all(
        "has no Gemm from integers to float; torchq.export_onnx(..., target="
        in node.reason
        for node in fallbacks
    )


class Attention(nn.Module):
    """One block of attention that finds its sizes while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_known_lengths_are_constants(dynamo: bool, path: Path) -> None:
    """Nothing is left to compute from shapes, and the batch stays open."""
    x = torch.randn(2, 5, 16)
    model = calibrated(Attention(), x)
    torchq.export_onnx(model, x, path, dynamo=dynamo)
    found = Counter(node.op_type for node in onnx.load(str(path)).graph.node)
    assert not found.keys() & {
        "Shape",
        "Concat",
        "Gather",
        "Cast",
        "Sqrt",
        "Div",
        "Mod",
    }, found
    for batch in (1, 7):
        report = torchq.verify_onnx(model, path, [torch.randn(batch, 5, 16)])
        assert report.ok, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_open_lengths_stay_open(dynamo: bool, path: Path) -> None:
    x = torch.randn(2, 5, 16)
    model = calibrated(Attention(), x)
    torchq.export_onnx(
        model, x, path, dynamo=dynamo, dynamic_shapes={"x": {1: "length"}}
    )
    for shape in ((1, 9, 16), (3, 2, 16)):
        report = torchq.verify_onnx(model, path, [torch.randn(shape)])
        assert report.ok, str(report)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_results_that_are_read_again_keep_their_open_batch(
    dynamo: bool, path: Path
) -> None:
    """The TorchScript exporter notes the example's batch as that of the results."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return y, y.reshape(y.shape[0], -1) * y.shape[1]

    x = torch.randn(2, 5, 16)
    model = calibrated(Both(), x)
    torchq.export_onnx(model, x, path, dynamo=dynamo)
    batch = torch.randn(7, 5, 16)
    for found, expected in zip(run_file(path, batch), model(batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_shapes_without_copied_lengths_and_casts_to_bfloat16(tmp_path: Path) -> None:
    """With ``allowzero`` a 0 is a length of zero; numpy has no bfloat16.

    The batch size that is noted for a result is the example's, and not used.
    """
    graph = graph_of(
        ("Shape", ["x"], ["s"], {}),
        ("Gather", ["s", "i"], ["n"], {}),
        ("Concat", ["n", "m"], ["t"], {"axis": 0}),
        ("Reshape", ["x", "t"], ["y"], {"allowzero": 1}),
        ("Cast", ["m"], ["half"], {"to": onnx.TensorProto.BFLOAT16}),
        ("Cast", ["half"], ["z"], {"to": onnx.TensorProto.FLOAT}),
        stored={"i": torch.tensor([0]), "m": torch.tensor([6])},
        shape=("batch", 2, 3),
        outputs={"y": (2, 6), "z": (1,)},
    )
    fold_shapes(graph)
    (reshape,) = nodes_of(graph, "Reshape")
    assert value_of(reshape.inputs[1]).tolist() == [-1, 6]
    assert [node.op_type for node in graph.graph] == ["Reshape", "Cast", "Cast"]


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.sample(4)
@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_attention_exports(target: str | None, dynamo: bool, path: Path) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(3, 6, 16)
    calibrated(model, x, target=target)
    report = torchq.export_onnx(
        model,
        x[:1],
        path,
        target=target,
        dynamo=dynamo,
        dynamic_shapes={"src": {1: "length"}},
    )
    parts = ("weight", "key_weight", "value_weight", "out_weight")
    assert {f"self_attn.{part}_quantizer" for part in parts} < set(report.weights)
    assert report.merged == {
        f"self_attn.{part}_quantizer": "self_attn.input_quantizer"
        for part in ("key", "value")
    }
    assert ("self_attn.softmax_quantizer" in ends(path, "QuantizeLinear")) == (
        target is not None
    )
    proof = torchq.verify_onnx(model, path, [x, torch.randn(2, 9, 16)])
    assert proof.ok, str(proof)
    kinds = [node.kind for node in torchq.inspect_onnx(path).integer]
    # Signed codes after ReLU, or forked, stay float; so does all in float16.
    wanted = {"onnxruntime": 8, "openvino": 5, "tensorrt": 0}.get(target or "", 3)
    assert (
        sum(kind in ("MatMulIntegerToFloat", "QLinearMatMul") for kind in kinds)
        >= wanted
    )


class Tagger(nn.Module):
    """A layer over a sequence, and a linear layer at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


# torch 2.9 warns of sizes and batches in traces; the file is compared on another batch too.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size")
@pytest.mark.filterwarnings(
    "ignore:export_onnx. 1 of its layers read an input in float"
)
@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(True, id="quantized hidden"),
        pytest.param(False, id="float hidden", marks=pytest.mark.slow),
    ],
)
def test_the_file_agrees_with_the_simulation(path: Path, hidden: bool) -> None:
    torch.manual_seed(0)
    model = Tagger().eval()
    x = torch.randn(2, 3, 4)
    rule = Rule("*lstm", input=QuantDescriptor(), weight=QuantDescriptor(axis=0))
    torchq.quantize_(model, torchq.recipes.int8().with_rules(rule))
    torchq.calibrate(model, [x], progress=False)
    for name, quantizer in quantizers(model).items():
        if "hidden" in name and not hidden:
            quantizer.mode = "off"
    said = pytest.warns(
        UserWarning, match=r"lstm \(3 steps\): the hidden state is quan"
    )
    with said if hidden else nullcontext():
        torchq.export_onnx(model, x, path)
    report = torchq.verify_onnx(model, path, [x, torch.randn(5, 3, 4)])
    assert " codes differ" in str(report) and ": 0 of " in str(report)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert ("LSTM" in kinds) is not hidden
    # The input of the layer and of the head, and the hidden state at 2 * 3 steps.
    assert kinds.count("QuantizeLinear") == (8 if hidden else 2)


def test_open_lengths_of_a_quantized_hidden_state_are_refused(path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger().eval()
    x = torch.randn(2, 3, 4)
    torchq.quantize_(model, torchq.recipes.int8(recurrent=True))
    torchq.calibrate(model, [x], progress=False)
    open_length = {"x": {1: "length"}}
    with pytest.raises(
        ExportError, match=r"lstm \(3 steps\): got dynamic_shapes .* x: 1"
    ):
        torchq.export_onnx(model, x, path, dynamic_shapes=open_length, progress=False)
    assert not path.exists()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size")
@pytest.mark.filterwarnings(
    "ignore:export_onnx. 1 of its layers read an input in float"
)
def test_the_remedy_for_steps_can_be_pasted(path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger().eval()
    x = torch.randn(2, 3, 4)
    torchq.quantize_(model, torchq.recipes.int8(recurrent=True))
    torchq.calibrate(model, [x], progress=False)
    with torchq.disabled(model, "*.hidden_*"):
        torchq.export_onnx(model, x, path, dynamo=False, progress=False)
        assert torchq.verify_onnx(model, path, [x], progress=False).ok
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("LSTM") == 1


class Listener(nn.Module):
    """A layer over a sequence of any length, whose result is the result."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.features = nn.Linear(4, 4)
        self.over_time = kind(4, 6, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.over_time(self.features(x))[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size")
@pytest.mark.filterwarnings("ignore:.* only .* quantized")
@pytest.mark.filterwarnings(
    "ignore:export_onnx. 1 of its layers read a weight in float"
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_open_length_is_open_or_refused(path: Path, kind: type[nn.RNNBase]) -> None:
    """Whether torch can trace it depends on its version; no version freezes it in silence."""
    model = Listener(kind).eval()
    x = torch.randn(6, 2, 4)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    shapes = {"x": {0: "time"}}
    options = {"dynamic_batch": False, "dynamic_shapes": shapes}
    with suppress(ExportError):
        torchq.export_onnx(model, x, path, **options)
    if not path.exists():
        torchq.export_onnx(model, x, path, dynamo=False, **options)
    assert torchq.verify_onnx(model, path, [x, torch.randn(9, 2, 4)]).ok


def test_parts_without_their_dimension_have_no_known_shape() -> None:
    """Shape inference of onnx says (2, 1), and a Reshape to the length of that is wrong."""
    model = graph_of(
        ("SplitToSequence", ["x"], ["parts"], {"axis": 1, "keepdims": 0}),
        ("SequenceAt", ["parts", "first"], ["part"], {}),
        ("Relu", ["part"], ["y"], {}),
        stored={"first": torch.tensor(0)},
        shape=[2, 3],
    )
    shapes = known_shapes(model)
    assert shapes["x"] == (2, 3)
    assert "part" not in shapes
    assert shapes.get("y") in (None, ())


class Experts(nn.Module):
    """One matrix for each expert, on the left or on the right of a product."""

    def __init__(self, is_left: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))
        self.is_left = is_left

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.is_left:
            return self.experts @ x.transpose(1, 2)
        return x @ self.experts


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("is_left", [True, False])
def test_several_matrices_in_one_weight_have_one_scale(
    is_left: bool, target: str, path: Path
) -> None:
    """A scale for each output of each matrix has two axes, which no file holds."""
    if target == "openvino":
        pytest.importorskip("openvino")
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    # Weights of 7 bits: products of 8 overflow on CPUs without VNNI.
    config = torchq.recipes.int8(reduce_range=True)
    net = calibrated(Experts(is_left), x, config=config, target=target, example=x)
    weight = net.get_submodule("experts_call.weight_quantizer")
    assert weight.amax.numel() == 1
    torchq.export_onnx(net, x, path, dynamo=False, dynamic_batch=False)
    assert torchq.verify_onnx(net, path, [x]).ok
    assert torchq.inspect_onnx(path).integer


class LastStep(nn.Module):
    """A recurrent layer, of which a linear layer reads every step."""

    def __init__(self, kind: Any, bidirectional: bool) -> None:
        super().__init__()
        options = {"batch_first": True, "bidirectional": bidirectional}
        self.recurrent = kind(8, 12, **options)
        self.last = nn.Linear(24 if bidirectional else 12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0])


@pytest.mark.filterwarnings("ignore:export_onnx.*the hidden state is quantized")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize(("kind", "both"), [(nn.LSTM, True), (nn.GRU, False)])
def test_the_input_of_recurrent_layers_is_multiplied_in_integers(
    kind: Any, both: bool, dynamo: bool, tmp_path: Path
) -> None:
    """Layers quantize it as a whole, and multiply all of its steps as one matrix."""
    torch.manual_seed(0)
    model = LastStep(kind, both).eval()
    x = torch.randn(2, 3, 8)
    # Such weights overflow on no CPU.
    config = torchq.recipes.int8(recurrent=True, reduce_range=True)
    options = {"target": "onnxruntime", "example": x, "progress": False}
    torchq.quantize_(model, config, **options)
    torchq.calibrate(model, [x], progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, x, path, dynamo=dynamo, progress=False)
    inspected = torchq.inspect_onnx(path)
    in_float = {node.kind: node.reason for node in inspected.fallbacks}
    assert in_float.keys().isdisjoint(["Gemm", "MatMul"])
    steps = "in the steps of a recurrent layer the products alone are quantized"
    assert in_float["Sigmoid"] == in_float["Mul"] == steps
    assert "put a quantizer there" not in str(inspected)
    batches = [x, torch.randn(5, 3, 8)]
    report = torchq.verify_onnx(model, path, batches, progress=False)
    assert report.ok, report


@pytest.mark.filterwarnings("ignore:export_onnx.*the hidden state is quantized")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("steps_first", [True, False])
def test_a_first_dimension_that_counts_steps_is_not_open(
    steps_first: bool, path: Path
) -> None:
    """The older exporter wrote a file with an open batch that took one length alone."""
    model = nn.GRU(4, 6, batch_first=not steps_first).eval()
    x = torch.randn(5, 2, 4)
    torchq.quantize_(model, torchq.recipes.int8(recurrent=True, reduce_range=True))
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    (entry,) = [i for i in onnx.load(str(path)).graph.input if i.name == "input"]
    first = entry.type.tensor_type.shape.dim[0]
    assert bool(first.dim_param) is not steps_first
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
