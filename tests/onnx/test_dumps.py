"""Tensors that another runtime wrote, beside the codes of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import SumNet
from tests.onnx.exported import calibrated
from torchq.errors import ConfigError, ExportError

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Any]:
    """A model, its file, and what a session of the file computes for each pair."""
    torch.manual_seed(0)
    model = calibrated(SumNet(), X, target="onnxruntime", example=X)
    path = tmp_path_factory.mktemp("dumps") / "model.onnx"
    torchq.export_onnx(model, X, path, target="onnxruntime", dynamo=False)
    return model, path, session_dump(path, "QuantizeLinear")


def session_dump(path: Path, kind: str) -> dict[str, Any]:
    """Return the results of all operators of a kind, as the file has them written."""
    graph = onnx.load(path)
    names = [node.output[0] for node in graph.graph.node if node.op_type == kind]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(graph.SerializeToString(), options)
    feeds = {session.get_inputs()[0].name: X.numpy()}
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_codes_of_a_session_are_those_of_the_model(
    dumped: tuple[nn.Module, Path, Any],
) -> None:
    model, _, dump = dumped
    report = torchq.verify_dump(model, dump, X)
    assert report.ok
    assert report.first is None
    assert not report.missing
    assert "of the device are those of the model" in str(report)
    assert report.tensors[0].name == "first.input_quantizer"


def test_the_first_tensor_that_differs_is_named(
    dumped: tuple[nn.Module, Path, Any],
) -> None:
    model, _, dump = dumped
    names = [tensor.source for tensor in torchq.verify_dump(model, dump, X).tensors]
    damaged = dict(dump)
    for name in names[2:]:
        damaged[name] = dump[name] // 2
    report = torchq.verify_dump(model, damaged, X)
    assert report.first is not None
    assert report.first.source == names[2]
    assert str(report).startswith("NOT the model: the first tensor beyond 5%")
    one_off = dict(dump)
    one_off[names[1]] = dump[names[1]] ^ 1  # each code is off by one
    assert not torchq.verify_dump(model, one_off, X).ok
    assert torchq.verify_dump(model, one_off, X, share=1.0).ok


def test_a_folder_of_values_with_channels_last(
    dumped: tuple[nn.Module, Path, Any], tmp_path: Path
) -> None:
    model, path, _ = dumped
    for name, values in session_dump(path, "DequantizeLinear").items():
        if "weight_quantizer" in name:
            continue
        last = values.transpose(0, 2, 3, 1) if values.ndim == 4 else values
        file = tmp_path / f"{name.replace('/', '_')}.raw"
        file.write_bytes(last.astype("float32").tobytes())
    report = torchq.verify_dump(model, tmp_path, X, layout="NHWC")
    assert report.ok
    assert len(report.tensors) >= 4
    assert not torchq.verify_dump(model, tmp_path, X).ok


def test_tensors_have_the_names_of_a_file(
    dumped: tuple[nn.Module, Path, Any],
) -> None:
    model, path, _ = dumped
    convolutions = session_dump(path, "Conv")
    with pytest.raises(
        ExportError, match=r"expected tensors of \w*SumNet, .*pass file="
    ):
        torchq.verify_dump(model, convolutions, X)
    report = torchq.verify_dump(model, convolutions, X, file=path)
    assert report.ok
    assert report.missing


def test_the_file_to_carry_to_a_device_has_inputs_and_codes(
    dumped: tuple[nn.Module, Path, Any], tmp_path: Path
) -> None:
    model, _, dump = dumped
    path = torchq.expected_codes(
        model,
        [X, X[:1]],
        tmp_path / "expected.npz",
    )
    with np.load(path, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["0/inputs/x"], X.numpy())
        assert arrays["1/inputs/x"].shape == (1, 3, 6, 6)
        source = "first.input_quantizer"
        expected = dump[f"{source}/codes"].astype("int32")
        assert np.array_equal(arrays[f"0/{source}"], expected)
        assert arrays[f"{source}/scale"].size == 1
    report = torchq.verify_dump(model, path, X)
    assert report.ok
    assert not report.missing


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((2, 3), "uint8"), r"has the shape \(2, 3\); expected \(2, 3, 6, 6\)"),
        (np.zeros((2, 3, 6, 6), "complex64"), "has the type complex64"),
        (np.full((2, 3, 6, 6), "a"), "has the type <U1"),
        (np.full((2, 3, 6, 6), np.nan, "float32"), "holds NaN"),
    ],
    ids=["shape", "type", "text", "nan"],
)
def test_a_tensor_that_cannot_be_compared_is_a_difference(
    dumped: tuple[nn.Module, Path, Any], array: Any, problem: str
) -> None:
    report = torchq.verify_dump(dumped[0], {"first.input_quantizer": array}, X)
    assert report.first is not None
    assert re.search(problem, report.first.problem)
    assert not report.ok


def test_tensors_of_bfloat16_are_read(dumped: tuple[nn.Module, Path, Any]) -> None:
    values = torch.zeros(2, 3, 6, 6, dtype=torch.bfloat16)
    report = torchq.verify_dump(dumped[0], {"first.input_quantizer": values}, X)
    assert report.first is not None
    assert not report.first.problem


def test_a_dump_that_is_none_is_one_named_error(
    dumped: tuple[nn.Module, Path, Any], tmp_path: Path
) -> None:
    model = dumped[0]
    (tmp_path / "other.npz").write_bytes(b"no file")
    with pytest.raises(ExportError, match=r"verify_dump: .*other\.npz: cannot be read"):
        torchq.verify_dump(model, tmp_path / "other.npz", X)
    with pytest.raises(ExportError, match=r"none\.npz: cannot be read"):
        torchq.verify_dump(model, tmp_path / "none.npz", X)
    with pytest.raises(ExportError, match=r"got no tensor; expected tensors of \w*Net"):
        torchq.verify_dump(model, {}, X)
    with pytest.raises(ConfigError, match="layout='CHW'; expected 'NCHW' or 'NHWC'"):
        torchq.verify_dump(model, {}, X, layout="CHW")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="SumNet has no quantizer of an activation"):
        torchq.verify_dump(SumNet(), {}, X)
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.npz"):
        torchq.expected_codes(model, [X], tmp_path / "codes.bin")


@pytest.mark.slow
def test_openvino_computes_the_codes_too(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    config = torchq.recipes.int8(reduce_range=True)
    model = calibrated(SumNet(), X, config=config, target="openvino", example=X)
    path = tmp_path / "model.onnx"
    torchq.export_onnx(model, X, path, target="openvino", dynamo=False)
    graph = onnx.load(path).graph
    names = [
        n.output[0]
        for n in graph.node
        if n.op_type == "DequantizeLinear" and "weight" not in n.name
    ]
    read = openvino.Core().read_model(path)
    read.add_outputs(names)
    compiled = openvino.compile_model(read, "CPU")
    results = compiled([X.numpy()])
    dump = {name: results[name] for name in names}
    report = torchq.verify_dump(model, dump, X)
    assert report.ok, str(report)


def test_an_empty_batch_and_two_names_that_files_write_alike(
    dumped: tuple[nn.Module, Path, Any],
) -> None:
    model, _, dump = dumped
    empty = {name: codes[:0] for name, codes in dump.items()}
    assert torchq.verify_dump(model, empty, X[:0]).ok
    source = "first.input_quantizer/codes"
    both = {"first_input_quantizer_codes": dump[source] // 2, source: dump[source]}
    report = torchq.verify_dump(model, dict(reversed(both.items())), X)
    assert report.ok
    assert report.unread == ("first_input_quantizer_codes",)


def test_what_has_no_integer_codes_and_bounds_that_are_none_are_refused(
    dumped: tuple[nn.Module, Path, Any], tmp_path: Path
) -> None:
    floats = calibrated(SumNet(), X, config=torchq.recipes.fp8())
    with pytest.raises(
        ConfigError, match=r"first\.input_quantizer: has the format e4m3"
    ):
        torchq.expected_codes(floats, [X], tmp_path / "codes.npz")
    assert not (tmp_path / "codes.npz").exists()
    with pytest.raises(ConfigError, match=r"share=2.*expected a share from 0 to 1"):
        torchq.verify_dump(dumped[0], {}, X, share=2.0)
