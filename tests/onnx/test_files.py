"""Files that are broken, deep or large, and files that a failed call must leave as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Residual, calibrated
from torchq.errors import ExportError
from torchq.onnx.ir import save_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper = onnx.helper


@pytest.fixture
def exported(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = calibrated(Residual(), torch.randn(8, 3, 16, 16))
    torchq.export_onnx(model, torch.randn(1, 3, 16, 16), tmp_path / "m.onnx", dynamo=False)
    return model, tmp_path / "m.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def full_disk(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("limit", [None, 0], ids=["one file", "external data"])
def test_a_failed_call_leaves_the_files_as_they_were(
    exported: tuple[nn.Module, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
) -> None:
    model, path = exported
    if limit is not None:
        monkeypatch.setattr("torchq.onnx.ir._EXTERNAL_ABOVE", limit)
    torchq.export_onnx(model, torch.randn(1, 3, 16, 16), path, dynamo=False)
    before = contents(tmp_path)
    assert len(before) == (1 if limit is None else 2)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        torchq.export_onnx(model, torch.randn(1, 3, 16, 16), path, dynamo=False)
    assert contents(tmp_path) == before


def breakages(good: bytes) -> dict[str, bytes]:
    """Contents of files that are no valid model."""
    model = onnx.ModelProto.FromString(good)
    circle = onnx.ModelProto.FromString(good)
    circle.graph.node[0].input[0] = circle.graph.node[-1].output[0]
    missing = onnx.ModelProto.FromString(good)
    del missing.graph.initializer[:]
    name = onnx.ModelProto.FromString(good).SerializeToString().replace(b"MaxPool", b"M\xf9xPool")
    shape = onnx.ModelProto.FromString(good)
    shape.graph.initializer[0].dims.append(2**40)
    kind = onnx.ModelProto.FromString(good)
    kind.graph.initializer[0].data_type = 77
    del model.graph.node[3].input[:]
    return {
        "nothing": b"",
        "zeros": bytes(64),
        "half a file": good[: len(good) // 2],
        "a node without inputs": model.SerializeToString(),
        "a circle": circle.SerializeToString(),
        "no stored tensors": missing.SerializeToString(),
        "a name that is no text": name,
        "a shape that does not fit": shape.SerializeToString(),
        "an unknown type": kind.SerializeToString(),
    }


def test_a_broken_file_is_one_error_with_its_name(
    exported: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = exported
    broken, batch = tmp_path / "broken.onnx", [torch.randn(2, 3, 16, 16)]
    for kind, data in breakages(path.read_bytes()).items():
        broken.write_bytes(data)
        for call in (
            lambda: torchq.verify_onnx(model, broken, batch),
            lambda: torchq.inspect_onnx(broken),
        ):
            with pytest.raises(ExportError) as error:
                call()
            assert "broken.onnx: is not a valid ONNX file" in str(error.value), kind


class Deep(nn.Module):
    """Forty additions, each of a value with itself behind a convolution: 2**40 paths."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x) + x
        return x


def test_every_float_node_of_a_deep_residual_network_is_listed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no active quantizer"):
        torchq.export_onnx(Deep().eval(), torch.randn(1, 4, 5, 5), tmp_path / "m.onnx")
    report = torchq.inspect_onnx(tmp_path / "m.onnx")
    kinds = [node.kind for node in report.fallbacks]
    assert kinds.count("Conv") == 40
    assert all("stored in float" in n.reason or "not quantized" in n.reason for n in report.nodes)


def test_a_broken_graph_is_refused_by_name_and_not_written(tmp_path: Path) -> None:
    """The optimizer of torch's newer exporter loses constants now and then."""
    ir = pytest.importorskip("onnx_ir")
    node = helper.make_node("Add", ["x", "lost"], ["y"])
    ends = [helper.make_tensor_value_info(name, 1, [2]) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = ir.from_proto(helper.make_model(graph))
    with pytest.raises(ExportError, match=r"m\.onnx: the graph is broken \(.*pass dynamo=True or"):
        save_model(model, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
