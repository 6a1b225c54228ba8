"""Names of inputs, outputs and open dimensions in exported files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from tests.frontends.onnx_writer import Writer
from tests.onnx.exported import calibrated
from torchq.errors import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXPORTERS = pytest.mark.parametrize("dynamo", [False, True])


def two_inputs(scores: str = "scores") -> fx.GraphModule:
    """Return what was read of a file whose names are no names of Python, two of them alike."""
    w = Writer(17)
    first, second = w.input("in.1", [None, 3, None, 8]), w.input("in/1", [None, 4, None, 6])
    h = w.node("Conv", first, w.random(4, 3, 3, 3), w.random(4))
    total = w.node("Add", w.node("Relu", h), second)
    file = w.model(w.node("Conv", total, w.random(5, 4, 3, 3), w.random(5)), total)
    for old, new in zip([v.name for v in file.graph.output], (scores, "sum:0"), strict=True):
        for node in file.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
    for value, name in zip(file.graph.output, (scores, "sum:0"), strict=True):
        value.name = name
    return torchq.from_onnx(file)


def batch(count: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8), torch.randn(count, 4, 6, 6)


def interface(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(str(path)).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def ready(model: nn.Module, *examples: Tensor) -> Any:
    torchq.quantize_(model)
    torchq.calibrate(model, [examples], progress=False)
    return model


@EXPORTERS
def test_a_model_that_was_read_keeps_the_names_of_its_file(tmp_path: Path, dynamo: bool) -> None:
    model, path = ready(two_inputs(), *batch()), tmp_path / "m.onnx"
    for each in (model, copy.deepcopy(model)):
        torchq.export_onnx(each, batch(), path, dynamo=dynamo)
        assert interface(path) == (["in.1", "in/1"], ["scores", "sum:0"])
    assert torchq.verify_onnx(model, path, [batch(3)]).ok
    # Keyword arguments in another order than the inputs of the file.
    arguments = list(torch.fx.symbolic_trace(model).graph.find_nodes(op="placeholder"))
    first, second = batch(3)
    swapped = {arguments[1].name: second, arguments[0].name: first}
    assert torchq.verify_onnx(model, path, [swapped]).ok


def test_names_that_are_given_win_over_those_of_the_file(tmp_path: Path) -> None:
    model, path = ready(two_inputs(), *batch()), tmp_path / "m.onnx"
    names = {"input_names": ["image"], "output_names": ["out", "side"]}
    torchq.export_onnx(model, batch(), path, **names)
    assert interface(path) == (["image", "in/1"], ["out", "side"])


def test_a_changed_model_has_the_names_of_its_exporter(tmp_path: Path) -> None:
    """An output that is taken away leaves no name for another one."""
    model = two_inputs()
    (results,) = model.graph.output_node().args
    assert isinstance(results, (tuple, list))
    model.graph.output_node().args = (results[1],)
    model.recompile()
    ready(model, *batch())
    torchq.export_onnx(model, batch(), tmp_path / "m.onnx")
    inputs, (output,) = interface(tmp_path / "m.onnx")
    assert inputs == ["in.1", "in/1"]
    assert output != "scores"


def test_open_dimensions_may_be_named_as_in_the_file(tmp_path: Path) -> None:
    model, path = ready(two_inputs(), *batch()), tmp_path / "m.onnx"
    shapes = {"in.1": {2: "height"}, "in/1": {2: "lower"}}
    torchq.export_onnx(model, batch(), path, dynamic_shapes=shapes, dynamo=False)
    taller = torch.randn(2, 3, 9, 8), torch.randn(2, 4, 7, 6)
    assert torchq.verify_onnx(model, path, [taller]).ok


def test_a_batch_that_the_file_fixes_stays_fixed_without_a_warning(tmp_path: Path) -> None:
    w = Writer(17)
    x = w.input("x", [2, 6])
    model = ready(torchq.from_onnx(w.model(w.node("MatMul", x, w.random(6, 4)))), torch.ones(2, 6))
    torchq.export_onnx(model, torch.ones(2, 6), tmp_path / "m.onnx")
    (value,) = onnx.load(tmp_path / "m.onnx").graph.input
    assert [size.dim_value for size in value.type.tensor_type.shape.dim] == [2, 6]


LINEAR = nn.Sequential(nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_shapes": ({1: "h"},)}, r"got dynamic_shapes=\(.*; expected a mapping from the"),
        ({"dynamic_shapes": {"input": "h"}}, "expected a mapping from the name of an input"),
        ({"dynamic_shapes": {"input": {1: 6}}}, "expected a mapping from the name of an input"),
        ({"dynamic_shapes": {"input": {1: ""}}}, "expected a mapping from the name of an input"),
        ({"dynamic_shapes": {3: {1: "h"}}}, r"names \['3'\]; expected some of .* \['input'\]"),
        ({"dynamic_shapes": {"input": {2: "h"}}}, "opens dimension 2 of 'input'; expected 0 to 1"),
        ({"dynamic_shapes": {"input": {-1: "h"}}}, "opens dimension -1 .*; expected 0 to 1"),
        ({"input_names": "x"}, r"got input_names='x'; expected a list of names"),
        ({"input_names": ["x", "y"]}, r"got input_names=\['x', 'y'\]; expected at most 1"),
        ({"output_names": [3]}, r"got output_names=\[3\]; expected a list of names"),
        ({"output_names": ["y", "y"]}, r"output_names=\['y', 'y'\]; expected different names"),
        ({"output_names": ["input"]}, "input as the name of an input and of an output"),
        ({"opset": 20.0}, r"got opset 20\.0; expected 10 to 23"),
        ({"opset": "20"}, r"got opset '20'; expected 10 to 23"),
    ],
)
def test_names_and_shapes_that_fit_no_file_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = calibrated(copy.deepcopy(LINEAR), torch.randn(4, 6))
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(model, torch.randn(2, 6), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())
