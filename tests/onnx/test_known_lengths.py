"""Pads whose number of zeros follows from lengths of images: where these are known, and opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import calibrated, run_file
from tests.onnx.padded import Mobile, Pad, exported, images, pads
from torchq.onnx.ir import load_model, nodes_of
from torchq.onnx.passes.pads import with_lengths

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXPORTERS = [False, True]


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_known_lengths_are_computed(dynamo: bool, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(2, 3, 13, 16)
    model = exported(Mobile(), x, path, dynamo=dynamo)
    assert pads(path) == [[1, 0, 1, 1], [1, 1, 2, 1]]
    assert not nodes_of(load_model(path), "Shape", "Ceil", "Concat", "ConstantOfShape", "Cast")
    assert torchq.verify_onnx(model, path, [x, images(3, 3, 13, 16)]).ok


def open_file(path: Path, x: Tensor, target: str) -> nn.Module:
    shapes = {"x": {2: "height", 3: "width"}}
    return exported(Mobile(), x, path, target, dynamic_shapes=shapes)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_open_lengths_become_known(target: str, tmp_path: Path) -> None:
    path, fixed, x = tmp_path / "model.onnx", tmp_path / "fixed.onnx", images(2, 3, 13, 16)
    model = open_file(path, x, target)
    assert len(nodes_of(load_model(path), "Pad")) == 2
    graph = path.read_bytes()
    fixed.write_bytes(with_lengths(graph, [("x", (1, 3, 13, 16))]))
    assert pads(fixed) == [[1, 0, 1, 1], [1, 1, 2, 1]]
    assert not nodes_of(load_model(fixed), "Shape")
    for count in (1, 2, 3):  # The batch stays open.
        y = images(count, 3, 13, 16)
        assert sqnr(run_file(fixed, y)[0], run_file(path, y)[0]) > 100
    assert torchq.verify_onnx(model, fixed, [x]).ok
    assert path.read_bytes() == graph


def test_files_without_computed_pads_stay(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    exported(nn.Sequential(nn.Conv2d(3, 4, 3), Pad(1, 0, value=2.0)), x, path, None)
    graph = path.read_bytes()
    assert b"Pad" in graph and with_lengths(graph, [("x", (1, 3, 6, 6))]) is graph
    open_file(path, images(1, 3, 16, 16), "onnxruntime")
    graph = path.read_bytes()
    assert with_lengths(graph, [("other", (1, 3, 16, 16))]) is graph


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_open_usual_shapes_apart(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(engine)
    opened = graphs_opened(engine, monkeypatch)
    x = images(1, 3, 16, 16)
    config = torchq.recipes.int8(reduce_range=True)
    model = calibrated(Mobile().eval(), x, config=config, target=engine, example=x)
    deployed = torchq.deploy(model, x, engine=engine)
    opened.clear()
    deployed._reset()
    found = []
    for shape in ((1, 3, 16, 16), (2, 3, 16, 16), (1, 3, 15, 18), (1, 3, 16, 16), (2, 3, 17, 17)):
        y = images(*shape)
        assert sqnr(deployed(y), model(y)) > 25
        found.append(list(opened))
    # OpenVINO opens a graph for this number of images alone.
    second = [0] if engine == "onnxruntime" else [0, 2]
    assert found == [[0], second, [0, 2], [0, 2], [0, 2]]


def graphs_opened(engine: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of Pad nodes of each graph that an engine opens."""
    import onnxruntime

    opened: list[int] = []

    def note(graph: bytes) -> None:
        nodes: Sequence[Any] = onnx.load_model_from_string(graph).graph.node
        opened.append(sum(node.op_type == "Pad" for node in nodes))

    if engine == "onnxruntime":
        session = onnxruntime.InferenceSession

        def start(path: str, *args: Any, **options: Any) -> Any:
            note(Path(path).read_bytes())
            return session(path, *args, **options)

        monkeypatch.setattr(onnxruntime, "InferenceSession", start)
        return opened
    import openvino

    read: list[bytes] = []

    class Core(openvino.Core):
        # Graphs are also read, without being compiled, to see whether they take an image size.
        def read_model(self, file: Any, *args: Any) -> Any:
            read.append(file.getvalue())
            return super().read_model(file, *args)

        def compile_model(self, *args: Any) -> Any:
            note(read[-1])
            return super().compile_model(*args)

    monkeypatch.setattr(openvino, "Core", Core)
    return opened
