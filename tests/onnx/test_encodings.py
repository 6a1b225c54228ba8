"""AIMET's encodings: equal after a round trip, and in AIMET's simulator where that is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Layers, Residual, calibrated, run_file
from torchq.cli import main
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.formats import integer_format
from torchq.functional import QParams
from torchq.onnx import apply_encodings, export_encodings, read_encodings
from torchq.onnx.ir import load_model, nodes_of, replace_stored, save_model, value_of
from torchq.onnx.qdq import qparams_of, quantizer_nodes, weight_nodes
from torchq.workflow import quantizers

pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings("ignore:export_onnx")  # float results, for QNN


class Tokens(nn.Module):
    """A block of linear layers with a norm and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.grow = nn.Linear(12, 24)
        self.shrink = nn.Linear(24, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shrink(torch.relu(self.grow(self.norm(x))))
        return self.head(x.mean(1))


NETWORKS = (
    (Layers, (4, 3, 16, 16)),
    (Residual, (4, 3, 16, 16)),
    (Tokens, (4, 6, 12)),
)


def quantized(
    cls: type[nn.Module], shape: tuple[int, ...], **options: Any
) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return calibrated(cls(), x, target="qnn", example=x, **options), x[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "shape", "version"),
    [*((*network, "2.0.0") for network in NETWORKS), (*NETWORKS[2], "1.0.0")],
)
def test_encodings_are_those_of_the_file_with_pairs(
    cls: type[nn.Module],
    shape: tuple[int, ...],
    version: Any,
    path: Path,
    tmp_path: Path,
) -> None:
    """Names are those of the tensors that the pairs quantize; weights are on their grid."""
    model, x = quantized(cls, shape)
    report = export_encodings(model, x, path, version=version)
    torchq.export_onnx(model, x, tmp_path / "pairs.onnx", target="qnn", progress=False)
    pairs = load_model(tmp_path / "pairs.onnx")
    plain = load_model(report.path)
    actual = read_encodings(report.encodings)
    assert sorted(actual) == sorted((*report.activations, *report.parameters))
    assert not nodes_of(plain, "QuantizeLinear", "DequantizeLinear")
    # What a layer's own quantizer of its result reads has no name of its own in the other file.
    of_results = [
        grid_of(qparams_of(node))
        for path, node in quantizer_nodes(pairs).items()
        if path.endswith(".output_quantizer")
    ]
    expected = {
        str(node.inputs[0].name): qparams_of(node)
        for path, node in quantizer_nodes(pairs).items()
        if not path.endswith(".output_quantizer")
    }
    others = set(report.activations) - set(expected)
    assert set(expected) < set(report.activations)
    assert len(others) == len(of_results) > 0
    assert sorted(
        grid_of(actual[name].stored(signed=False)) for name in others
    ) == sorted(of_results)
    for name, node in weight_nodes(pairs).items():
        expected[name.removesuffix("_quantizer")] = qparams_of(node)
    for name, qparams in expected.items():
        ours = actual[name].stored(signed=bool(qparams.quant_min))
        assert ours.format == qparams.format and torch.equal(
            ours.scale, qparams.scale
        ), name
        assert torch.equal(
            ours.zero_point, qparams.zero_point.float().expand(ours.scale.shape)
        )
    for name in report.parameters:
        weight = value_of(plain.graph.initializers[name])
        qparams = expected[name]
        codes = qparams.codes(qparams.scaled(weight))
        assert torch.equal(qparams.dequantize(qparams.centered(codes)), weight)
        assert len(codes.unique()) > 8


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
@pytest.mark.parametrize(("cls", "shape"), NETWORKS)
def test_aimet_holds_what_is_written(
    cls: type[nn.Module], shape: tuple[int, ...], version: Any, path: Path
) -> None:
    """All tensors with 1.0.0; with 2.0.0 those that the report does not say are moved."""
    onnx = pytest.importorskip("onnx")
    quantsim = pytest.importorskip("aimet_onnx.quantsim")
    model, x = quantized(cls, shape)
    report = export_encodings(model, x, path, version=version)
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


def grid_of(qparams: QParams) -> tuple[float, float, str]:
    return float(qparams.scale), float(qparams.zero_point), str(qparams.format)


def activation_grids(file: Any) -> list[tuple[float, float, str]]:
    """Return the grids of a file in an order that does not depend on its branches."""
    return sorted(grid_of(qparams_of(node)) for node in quantizer_nodes(file).values())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("cls", "shape", "version"),
    [
        (*NETWORKS[0], "1.0.0"),
        (*NETWORKS[2], "1.0.0"),
        (*NETWORKS[2], "2.0.0"),
    ],
)
def test_encodings_on_the_float_file_give_the_codes_of_the_model(
    cls: type[nn.Module],
    shape: tuple[int, ...],
    version: Any,
    path: Path,
    tmp_path: Path,
) -> None:
    """The float file has weights off the grid, as that of AIMET may have."""
    pytest.importorskip("onnxruntime")
    model, x = quantized(cls, shape)
    report = export_encodings(model, x, path, version=version)
    options: dict[str, Any] = {"progress": False, "dynamo": False}
    torchq.export_onnx(model, x, tmp_path / "own.onnx", **options)
    graph = load_model(report.path)
    own = dict(model.named_parameters())
    for name in report.parameters:
        stored = graph.graph.initializers[name]
        weight = own[name] if own[name].shape == stored.shape else own[name].T
        assert not torch.equal(weight, value_of(stored))
        replace_stored(stored, weight)
    save_model(graph, report.path)

    read = torchq.from_onnx(report.path)
    torchq.quantize_(read, target="qnn", example=x)
    actual = apply_encodings(read, report.encodings, x)
    taken = {name for names in actual.values() for name in names}
    assert taken == {*report.activations, *report.parameters}
    assert all(q.calibrated for q in quantizers(read).values() if q.quantizing)
    torchq.export_onnx(read, x, tmp_path / "q.onnx", **options)
    files = [load_model(tmp_path / name) for name in ("own.onnx", "q.onnx")]
    grids = [activation_grids(file) for file in files]
    assert grids[0] == grids[1]
    assert len(grids[0]) == len(report.activations)
    codes, others = (
        {k: value_of(n.inputs[0]) for k, n in weight_nodes(f).items()} for f in files
    )
    assert set(codes) == set(others)
    assert len(codes) == len(report.parameters)
    for name, stored in codes.items():
        assert torch.equal(stored, others[name])
        assert len(stored.unique()) > 8
    own_results, results = (
        run_file(tmp_path / name, x) for name in ("own.onnx", "q.onnx")
    )
    for result, expected in zip(results, own_results, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.slow
def test_encodings_that_do_not_fit_are_one_error(path: Path) -> None:
    model, x = quantized(Tokens, (4, 6, 12))
    report = export_encodings(model, x, path)
    grids = read_encodings(report.encodings)
    read = torchq.from_onnx(report.path)
    torchq.quantize_(read, target="qnn", example=x)
    one = grids["relu"]
    few = torch.full((7,), 0.1)
    one_of_many = torch.full_like(grids["grow.weight"].scale, 3.0)
    for change, message in (
        (
            {"a": one},
            r"matches 0 of 8 quantizers; expected the ranges of this network. It has a,",
        ),
        (
            {n: g for n, g in grids.items() if n != "grow.weight"},
            r"reads grow\.weight\. Leave",
        ),
        (
            {**grids, "relu": replace(one, format=integer_format(4))},
            r"got int4 with 1 scales for",
        ),
        (
            {**grids, "grow.weight": replace(grids["grow.weight"], scale=few)},
            r"grow\.weight_quantizer: got int8 with 7 scales for grow\.weight, and the quantizer "
            r"is int8 axis=0 max with 24; expected the same",
        ),
        (
            {
                **grids,
                "grow.weight": replace(grids["grow.weight"], zero_point=one_of_many),
            },
            "got asymmetric int8 with 24 scales",
        ),
    ):
        with pytest.raises(CalibrationError, match=message):
            apply_encodings(read, change, x)
        assert not any(q.calibrated for q in quantizers(read).values())
    with pytest.raises(
        ConfigError, match=r"got a Tokens; expected what torchq.from_onnx made"
    ):
        apply_encodings(model, grids, x)


@pytest.mark.slow
def test_a_quantizer_of_two_tensors_wants_one_grid(path: Path) -> None:
    model, x = quantized(Residual, (4, 3, 16, 16))
    report = export_encodings(model, x, path)
    grids = read_encodings(report.encodings)
    read = torchq.from_onnx(report.path)
    torchq.quantize_(read, target="qnn", example=x)
    grids["relu_5"] = replace(
        grids["relu_5"],
        scale=grids["relu_5"].scale * 2,
    )
    with pytest.raises(
        CalibrationError, match="reads relu_5 and another tensor with another grid"
    ):
        apply_encodings(read, grids, x)


@pytest.mark.slow
def test_one_command_makes_a_file_of_encodings(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = quantized(Residual, (4, 3, 16, 16))
    report = export_encodings(model, x, path)
    ranges = ["--encodings", str(report.encodings)]
    arguments = ["quantize", str(report.path), "--target", "qnn", "--export"]
    assert main([*arguments, str(tmp_path / "q.onnx"), *ranges]) == 0
    assert f"ranges from {report.encodings}" in capsys.readouterr().out
    assert len(quantizer_nodes(load_model(tmp_path / "q.onnx"))) == len(
        report.activations
    )
    with pytest.raises(SystemExit):
        main([*arguments, str(tmp_path / "q.onnx"), *ranges, "--cache", "calib.cache"])
    assert "not allowed with argument --encodings" in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_names_what_readers_do_otherwise(path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = calibrated(Residual(), x)  # for no target: additions read in float
    report = export_encodings(model, x[:1], path, target=None)
    assert report.moved == ("max_pool2d", "view")
    assert len(report.widened) == 2
    assert "node_add" in report.widened[0]
    assert "may skip its encoding" in str(report)
    assert "which reads it in float here" in str(report)


def test_a_failure_leaves_both_files(path: Path, tmp_path: Path) -> None:
    for name in ("m.onnx", "m.encodings"):
        (tmp_path / name).write_text("old")
    model, x = quantized(Layers, (4, 3, 16, 16))
    with pytest.raises(ConfigError, match=r"got version .0\.6\.1.; expected one of"):
        export_encodings(model, x, path, version="0.6.1")  # type: ignore[arg-type]
    float8 = calibrated(Layers(), x, config=torchq.recipes.fp8())
    with pytest.raises(
        ExportError, match="a float format; expected integers with fixed ranges"
    ):
        export_encodings(float8, x, path, target=None)
    assert [p.read_text() for p in sorted(tmp_path.iterdir())] == ["old", "old"]


ENTRY = {
    "name": "x",
    "dtype": "INT",
    "bw": 8,
    "is_sym": False,
    "enc_type": "PER_TENSOR",
}
UNEQUAL = {"enc_type": "PER_CHANNEL", "scale": [1, 2, 3], "offset": [0, 0]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not JSON"),
        ("\x93NUMPY", "not JSON"),
        (
            json.dumps({"version": "1.0.0", "param_encodings": [{**ENTRY, **UNEQUAL}]}),
            "'x': RuntimeError: The expanded size",
        ),
        ("[]", "got version None"),
        (
            json.dumps({"version": "0.6.1", "activation_encodings": {}}),
            "got version '0.6.1'",
        ),
        (
            json.dumps({"version": "1.0.0", "param_encodings": {}}),
            "param_encodings: got a dict",
        ),
        (
            json.dumps({"version": "1.0.0", "param_encodings": [{}]}),
            "expected a 'name'",
        ),
        (
            json.dumps({"version": "1.0.0", "param_encodings": [3.0]}),
            "expected a mapping",
        ),
        (
            json.dumps({"version": "1.0.0", "param_encodings": [ENTRY]}),
            "'x': KeyError: 'scale'",
        ),
        (
            json.dumps(
                {"version": "1.0.0", "param_encodings": [{**ENTRY, "enc_type": "LPBQ"}]}
            ),
            "'x': ValueError: got INT LPBQ",
        ),
        (
            json.dumps(
                {
                    "version": "2.0.0",
                    "encodings": [{"name": "x", "output_dtype": "float8"}],
                }
            ),
            "'x': ValueError: got float8",
        ),
    ],
)
def test_broken_files_are_named(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.encodings"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"m\.encodings.*{text}"):
        read_encodings(path)
