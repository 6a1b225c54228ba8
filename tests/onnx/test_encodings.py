"""AIMET's encodings: equal after a round trip, and in AIMET's simulator where that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Layers, Residual, calibrated
from torchq.errors import ConfigError, ExportError
from torchq.onnx import export_encodings, read_encodings
from torchq.onnx.ir import load_model, nodes_of, value_of
from torchq.onnx.qdq import qparams_of, quantizer_nodes, weight_nodes

pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings("ignore:export_onnx")  # float results, for QNN


class Tokens(nn.Module):
    """A block of linear layers with a norm and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shrink(torch.relu(self.grow(self.norm(x))))
        return self.head(x.mean(1))


NETWORKS = ((Layers, (4, 3, 16, 16)), (Residual, (4, 3, 16, 16)), (Tokens, (4, 6, 12)))


def quantized(cls: type[nn.Module], shape: tuple[int, ...], **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return calibrated(cls(), x, target="qnn", example=x, **options), x[:1]


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
@pytest.mark.parametrize(("cls", "shape"), NETWORKS)
def test_encodings_are_those_of_the_file_with_pairs(
    cls: type[nn.Module], shape: tuple[int, ...], version: Any, tmp_path: Path
) -> None:
    """Names are those of the tensors that the pairs quantize; weights are on their grid."""
    model, x = quantized(cls, shape)
    report = export_encodings(model, x, tmp_path / "m.onnx", version=version)
    torchq.export_onnx(model, x, tmp_path / "pairs.onnx", target="qnn", progress=False)
    pairs, plain = load_model(tmp_path / "pairs.onnx"), load_model(report.path)
    found = read_encodings(report.encodings)
    assert sorted(found) == sorted((*report.activations, *report.parameters))
    assert not nodes_of(plain, "QuantizeLinear", "DequantizeLinear")
    expected = {str(n.inputs[0].name): qparams_of(n) for n in quantizer_nodes(pairs).values()}
    assert set(expected) == set(report.activations)
    for name, node in weight_nodes(pairs).items():
        expected[name.removesuffix("_quantizer")] = qparams_of(node)
    for name, qparams in expected.items():
        ours = found[name].stored(signed=bool(qparams.quant_min))
        assert ours.format == qparams.format and torch.equal(ours.scale, qparams.scale), name
        assert torch.equal(ours.zero_point, qparams.zero_point.float().expand(ours.scale.shape))
    for name in report.parameters:
        weight = value_of(plain.graph.initializers[name])
        qparams = expected[name]
        codes = qparams.codes(qparams.scaled(weight))
        assert torch.equal(qparams.dequantize(qparams.centered(codes)), weight)
        assert len(codes.unique()) > 8


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
@pytest.mark.parametrize(("cls", "shape"), NETWORKS)
def test_aimet_holds_what_is_written(
    cls: type[nn.Module], shape: tuple[int, ...], version: Any, tmp_path: Path
) -> None:
    """All tensors with 1.0.0; with 2.0.0 those that the report does not say are moved."""
    onnx = pytest.importorskip("onnx")
    quantsim = pytest.importorskip("aimet_onnx.quantsim")
    model, x = quantized(cls, shape)
    report = export_encodings(model, x, tmp_path / "m.onnx", version=version)
    simulation = quantsim.QuantizationSimModel(
        onnx.load(report.path), param_type="int8", activation_type="int8",
        providers=["CPUExecutionProvider"],
    )  # fmt: skip
    quantsim.load_encodings_to_sim(simulation, str(report.encodings), strict=False)
    for name, qparams in read_encodings(report.encodings).items():
        if version == "2.0.0" and name in report.moved:
            continue
        held = simulation.qc_quantize_op_dict[name].get_encodings()
        scales = torch.tensor([e.delta for e in held], dtype=torch.float32)
        offsets = torch.tensor([e.offset for e in held], dtype=torch.float32)
        assert torch.equal(scales, qparams.scale.flatten()), name
        expected = (qparams.quant_min - qparams.zero_point).flatten().float()
        assert torch.equal(offsets, expected.expand(len(held))), name
        assert {e.bw for e in held} == {qparams.format.bits}


def test_the_report_names_what_readers_do_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = calibrated(Residual(), x)  # for no target: additions read in float
    report = export_encodings(model, x[:1], tmp_path / "m.onnx", target=None)
    assert report.moved == ("max_pool2d", "view")
    assert len(report.widened) == 2 and "node_add" in report.widened[0]
    assert "may skip its encoding" in str(report) and "which reads it in float here" in str(report)


def test_a_failure_leaves_both_files(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for name in ("m.onnx", "m.encodings"):
        (tmp_path / name).write_text("old")
    model, x = quantized(Layers, (4, 3, 16, 16))
    with pytest.raises(ConfigError, match=r"got version .0\.6\.1.; expected one of"):
        export_encodings(model, x, path, version="0.6.1")  # type: ignore[arg-type]
    float8 = calibrated(Layers(), x, config=torchq.recipes.fp8())
    with pytest.raises(ExportError, match="a float format; expected integers with fixed ranges"):
        export_encodings(float8, x, path, target=None)
    assert [p.read_text() for p in sorted(tmp_path.iterdir())] == ["old", "old"]


ENTRY = {"name": "x", "dtype": "INT", "bw": 8, "is_sym": False, "enc_type": "PER_TENSOR"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not JSON"),
        ("[]", "got version None"),
        (json.dumps({"version": "0.6.1", "activation_encodings": {}}), "got version '0.6.1'"),
        (json.dumps({"version": "1.0.0", "param_encodings": {}}), "param_encodings: got a dict"),
        (json.dumps({"version": "1.0.0", "param_encodings": [{}]}), "expected a 'name'"),
        (json.dumps({"version": "1.0.0", "param_encodings": [ENTRY]}), "'x': KeyError: 'scale'"),
        (
            json.dumps({"version": "1.0.0", "param_encodings": [{**ENTRY, "enc_type": "LPBQ"}]}),
            "'x': ValueError: got INT LPBQ",
        ),
        (
            json.dumps(
                {"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "float8"}]}
            ),
            "'x': ValueError: got float8",
        ),
    ],
)
def test_broken_files_are_named(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.encodings"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"m\.encodings.*{text}"):
        read_encodings(path)
