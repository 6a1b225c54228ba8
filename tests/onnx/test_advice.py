"""What ``verify_onnx`` advises where a file differs: lines that can be pasted, and that help."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.onnx import VerifyReport

onnx = pytest.importorskip("onnx")
numpy_helper = pytest.importorskip("onnx.numpy_helper")
pytest.importorskip("onnxruntime")
X = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))


def quantized(target: str | None = "onnxruntime") -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    model = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.ReLU(), *last).eval()
    torchq.fuse_(model, X, progress=False)
    recipe = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, recipe, target=target, example=X, progress=False)
    torchq.calibrate(model, [X], progress=False)
    return model


def exported(model: nn.Module, path: Path, **options: Any) -> VerifyReport:
    torchq.export_onnx(model, X, path, dynamo=False, progress=False, **options)
    return torchq.verify_onnx(model, path, [X], progress=False)


def change_a_weight(path: Path) -> None:
    """Move all codes of the first weight by one."""
    file = onnx.load(path)
    codes = next(
        tensor
        for tensor in file.graph.initializer
        if tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
        and len(tensor.dims) > 1
    )
    moved = numpy_helper.from_array(numpy_helper.to_array(codes) + 1, codes.name)
    codes.CopyFrom(moved)
    onnx.save(file, path)


def do(report: VerifyReport, model: nn.Module, path: Path) -> VerifyReport:
    """Run the lines that a printed report advises; return what the file says then."""
    shown = str(report).splitlines()
    place = next(n for n, line in enumerate(shown) if line.startswith("  next: "))
    names = {"torchq": torchq, "model": model, "batches": [X]}
    exec(shown[place + 1].strip(), names)
    return torchq.verify_onnx(model, path, [X], progress=False)


def test_a_file_of_another_state_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    model = quantized()
    assert exported(model, path).ok
    change_a_weight(path)
    report = torchq.verify_onnx(model, path, [X], progress=False)
    assert not report.ok and "another state" in report.hint
    assert do(report, model, path).ok


@pytest.mark.filterwarnings("ignore:export_onnx")
def test_a_model_of_another_target_is_quantized_for_that_of_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.onnx"
    model = quantized(None)
    exported(model, path, target="onnxruntime")
    change_a_weight(path)
    report = torchq.verify_onnx(model, path, [X], progress=False)
    assert not report.ok and "was not quantized for onnxruntime" in report.hint
    assert do(report, model, path).ok


def test_a_layer_that_the_runtime_computes_otherwise_may_stay_in_float(
    tmp_path: Path,
) -> None:
    """A file whose convolution reads other places than the model's has equal parameters."""
    path = tmp_path / "net.onnx"
    model = quantized()
    assert exported(model, path).ok
    other = copy.deepcopy(model)
    other[0].stride = (2, 2)
    other[0].padding = (2, 2)
    exported(other, path)
    report = torchq.verify_onnx(model, path, [X], progress=False)
    assert not report.ok
    assert "computes this layer in another way" in report.hint
    assert do(report, model, path).ok


def test_nothing_is_advised_where_a_file_agrees(tmp_path: Path) -> None:
    report = exported(quantized(), tmp_path / "net.onnx")
    assert report.ok and "next: " not in str(report)
