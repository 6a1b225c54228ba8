"""Integer regions in ONNX Runtime, the rules of TensorRT, and one calibrated model for both."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Layers, Residual, calibrated, ends, run_file
from torchq import QuantConfig, QuantDescriptor, Rule

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    return calibrated(
        Residual(),
        x,
        target="onnxruntime",
        example=x[:1],
    )


def write(
    model: nn.Module,
    path: Path,
    target: str | None,
    shape: tuple[int, ...] = (1, 3, 16, 16),
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torchq.export_onnx(
            model, torch.randn(shape), path, target=target, dynamo=False
        )


def settings(path: Path) -> dict[str, tuple[float, int, int]]:
    """Scale, zero point and type of every activation."""
    values = {t.name: t for t in onnx.load(str(path)).graph.initializer}
    out = {}
    for name, node in ends(path, "QuantizeLinear").items():
        scale, zero = (values[i] for i in node.input[1:])
        out[name] = (
            float(onnx.numpy_helper.to_array(scale)),
            int(onnx.numpy_helper.to_array(zero)),
            zero.data_type,
        )
    return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnxruntime_gets_whole_integer_regions(
    model: nn.Module, dynamo: bool, tmp_path: Path
) -> None:
    """Every convolution, addition and concatenation runs on integers, and the file agrees."""
    report = torchq.export_onnx(
        model,
        torch.randn(1, 3, 16, 16),
        tmp_path / "m.onnx",
        target="onnxruntime",
        dynamo=dynamo,
    )
    assert report.warnings == ()
    nodes = torchq.inspect_onnx(tmp_path / "m.onnx")
    kinds = [node.kind for node in nodes.integer]
    expected = {
        "QLinearConv": 7,
        "QLinearAdd": 2,
        "QLinearConcat": 1,
        "MatMulIntegerToFloat": 1,
    }
    assert {kind: kinds.count(kind) for kind in expected} == expected
    assert nodes.fallbacks == ()
    proof = torchq.verify_onnx(
        model,
        tmp_path / "m.onnx",
        [torch.randn(8, 3, 16, 16)],
    )
    assert proof.ok, str(proof)


def test_a_convolution_whose_result_is_flattened_runs_on_integers(
    tmp_path: Path,
) -> None:
    """The heads of MobileNetV4 and GhostNet: pooling, a convolution, and a linear layer."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    path = tmp_path / "m.onnx"
    parts = (
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(16, 32, 1),
    )
    head = nn.Sequential(*parts, nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    head = calibrated(head, x, target="onnxruntime", example=x[:1])
    write(head, path, "onnxruntime", (2, 3, 8, 8))
    kinds = torchq.inspect_onnx(path).counts
    assert kinds["QLinearConv"] == 2
    assert not {"Conv", "FusedConv"} & kinds.keys()
    assert torchq.verify_onnx(head, path, [x], progress=False).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_silu_runs_on_integers_in_onnxruntime(tmp_path: Path, dynamo: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    layers = (
        nn.Conv2d(3, 16, 3),
        nn.SiLU(),
        nn.Conv2d(16, 8, 3),
        nn.SiLU(),
        nn.Conv2d(8, 4, 1),
    )
    net = calibrated(nn.Sequential(*layers), x, target="onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(
            net, x, tmp_path / "m.onnx", target="onnxruntime", dynamo=dynamo
        )
    nodes = torchq.inspect_onnx(tmp_path / "m.onnx")
    kinds = [node.kind for node in nodes.integer]
    assert [kinds.count(f"QLinear{kind}") for kind in ("Conv", "Sigmoid", "Mul")] == [
        2,
        2,
        2,
    ]
    assert torchq.verify_onnx(net, tmp_path / "m.onnx", [x]).ok


class Heads(nn.Module):
    """A linear layer whose result is quantized again, one whose result is not, one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, 5)
        self.plain = nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.hidden(x).relu()
        return self.out(x), self.plain(x)


def test_linear_layers_run_on_integers_in_onnxruntime(tmp_path: Path) -> None:
    """A Gemm without a quantized result would dequantize its weight on every call."""
    model = calibrated(
        Heads(),
        torch.randn(16, 8),
        target="onnxruntime",
    )
    write(model, tmp_path / "m.onnx", "onnxruntime", (2, 8))
    nodes = torchq.inspect_onnx(tmp_path / "m.onnx")
    expected = ["QGemm", "MatMulIntegerToFloat", "MatMulIntegerToFloat"]
    assert [node.kind for node in nodes.integer] == expected
    assert nodes.fallbacks == ()
    proof = torchq.verify_onnx(
        model, tmp_path / "m.onnx", [torch.randn(7, 8), torch.randn(1, 8)]
    )
    assert proof.ok, str(proof)


@pytest.mark.slow
def test_tensorrt_leaves_the_branch_of_the_convolution_open(tmp_path: Path) -> None:
    x = torch.randn(4, 8, 16, 16)
    model = Residual()
    model.stem = nn.Conv2d(8, 16, 3, padding=1)
    calibrated(model, x, target="tensorrt", example=x)
    report = write(
        model,
        tmp_path / "m.onnx",
        "tensorrt",
        (1, 8, 16, 16),
    )
    assert report.warnings == ()
    nodes = {
        o: n for n in onnx.load(str(tmp_path / "m.onnx")).graph.node for o in n.output
    }
    sums = [n for n in nodes.values() if n.op_type == "Add"]
    assert [[nodes[i].op_type for i in n.input] for n in sums] == [
        ["Conv", "DequantizeLinear"]
    ] * 2
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [x]).ok


class Deconvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(16, 16, 3)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torchq.nn.QuantIdentity()
        self.b = torchq.nn.QuantIdentity()
        self.conv = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.cat([self.a(x), self.b(3 * x)], dim=1))


RULES = [
    (
        Deconvolution(),
        None,
        r"(?s)- up: TensorRT scales ConvTranspose weights on axis 0.*QuantDescriptor\(axis=0\)",
    ),
    (
        Joined(),
        None,
        r"a\.input_quantizer: the inputs of .* have different scales; use QuantCat, .*share_range_",
    ),
    (
        nn.Sequential(nn.Conv2d(16, 16, 1)),
        QuantConfig(
            (Rule("0", input=QuantDescriptor(axis=1), weight=QuantDescriptor()),)
        ),
        r"0\.input_quantizer: TensorRT takes one scale for an activation",
    ),
]


@pytest.mark.parametrize(
    ("module", "config", "message"),
    RULES,
    ids=range(len(RULES)),
)
def test_tensorrt_rules_name_the_layer_and_the_fix(
    module: nn.Module, config: QuantConfig | None, message: str, tmp_path: Path
) -> None:
    model = calibrated(
        copy.deepcopy(module),
        torch.randn(4, 16, 8, 8),
        config=config,
    )
    arguments = (model, torch.randn(1, 16, 8, 8), tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match=message):
        report = torchq.export_onnx(*arguments, target="tensorrt", dynamo=False)
    assert len(report.warnings) >= 1


@pytest.mark.filterwarnings(
    "ignore:export_onnx. 2 of its layers read a weight in float"
)
def test_the_report_groups_warnings_and_fits_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    model = nn.Sequential(
        nn.Conv2d(16, 10, 1),
        nn.ReLU(),
        nn.Conv2d(10, 16, 1),
    )
    for conv in (model[0], model[2]):
        torchq.quantize_(
            conv, QuantConfig((Rule("type:*Conv2d", input=QuantDescriptor(axis=1)),))
        )
    torchq.calibrate(
        model.eval(),
        [torch.randn(4, 16, 8, 8)],
        progress=False,
    )
    arguments = (model, torch.randn(1, 16, 8, 8), tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match="TensorRT takes one") as warned:
        report = torchq.export_onnx(*arguments, target="tensorrt", dynamo=False)
    message = next(text for w in warned if "TensorRT" in (text := str(w.message)))
    assert "- 0.input_quantizer, 2.input_quantizer: TensorRT takes" in message
    assert max(map(len, message.splitlines())) <= 60
    # The report counts what the screen has shown already.
    assert "TensorRT takes" in report.warnings[0]
    assert "TensorRT takes" not in str(report)
    assert str(report).splitlines()[-1] == "with 3 warnings: print(*report.warnings)"


def test_transposed_convolutions_keep_float_inputs_in_onnxruntime(
    tmp_path: Path,
) -> None:
    model = calibrated(
        Layers(),
        torch.randn(4, 3, 9, 9),
        target="onnxruntime",
    )
    assert isinstance(model.up.input_quantizer, nn.Identity)
    write(
        model,
        tmp_path / "m.onnx",
        "onnxruntime",
        (1, 3, 9, 9),
    )
    assert "up.input_quantizer" not in ends(tmp_path / "m.onnx", "QuantizeLinear")
    stored = {t.name: t for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer}
    assert (
        stored["up.weight_quantizer/float weight"].data_type == onnx.TensorProto.FLOAT
    )
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [torch.randn(2, 3, 9, 9)]).ok


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_export_like_torch(groups: int, tmp_path: Path) -> None:
    """Without quantizers the model is torch's bit for bit; with them the file equals it."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[12, 13])

    model = Sized()
    x = torch.randn(2, 4, 5, 6)
    with torch.no_grad():
        expected = model(x)
    assert expected.shape[2:] == (12, 13)
    calibrated(model, x)
    with torchq.disabled(model), torch.no_grad():
        assert torch.equal(model(x), expected)
    torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=False, dynamic_batch=False)
    torch.testing.assert_close(
        run_file(tmp_path / "m.onnx", x)[0], model(x), rtol=0, atol=1e-6
    )


def test_concatenated_tensors_carry_one_scale(tmp_path: Path) -> None:
    """Additions and concatenations have Q/DQ on all operands; concatenations have one scale."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.add = torchq.nn.QuantAdd()
            self.cat = torchq.nn.QuantCat(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.cat([self.add(x, self.conv(x)), 5 * x])

    model = calibrated(
        Written(),
        torch.randn(8, 4, 6, 6),
    )
    twin = Written()
    torchq.quantize_(twin)
    twin.load_state_dict(copy.deepcopy(model).state_dict(), strict=True)
    for candidate in (model, copy.deepcopy(model), twin.eval()):
        torchq.export_onnx(
            candidate, torch.randn(1, 4, 6, 6), tmp_path / "m.onnx", dynamo=False
        )
        actual = settings(tmp_path / "m.onnx")
        assert actual["cat.input_quantizer"] == actual["cat.input_quantizer#2"]
        nodes = {
            output: node
            for node in onnx.load(str(tmp_path / "m.onnx")).graph.node
            for output in node.output
        }
        joined = [node for node in nodes.values() if node.op_type in ("Add", "Concat")]
        assert [[nodes[name].op_type for name in node.input] for node in joined] == [
            ["DequantizeLinear"] * 2
        ] * 2
        assert torchq.verify_onnx(
            candidate, tmp_path / "m.onnx", [torch.randn(4, 4, 6, 6)]
        ).ok


def test_activations_with_a_range_per_channel_stay_as_they_are(tmp_path: Path) -> None:
    config = QuantConfig(
        (Rule("0", input=QuantDescriptor(axis=1), weight=QuantDescriptor(axis=0)),)
    )
    model = calibrated(
        nn.Sequential(nn.Linear(4, 4)), torch.randn(16, 4), config=config
    )
    write(model, tmp_path / "m.onnx", "onnxruntime", (2, 4))
    zero = ends(tmp_path / "m.onnx", "QuantizeLinear")["0.input_quantizer"].input[2]
    (stored,) = [
        t
        for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer
        if t.name == zero
    ]
    assert (stored.data_type, list(stored.dims)) == (onnx.TensorProto.INT8, [4])
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [torch.randn(5, 4)]).ok
