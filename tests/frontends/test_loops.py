"""Loop and Scan: what is read runs its body as ONNX Runtime does, and is exported by rounds."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from tests.frontends.onnx_writer import TYPES, Writer, assert_agrees, helper
from torchq.errors import FrontendError
from torchq.onnx.torch_exporters import TorchExportError

Info = tuple[str, Sequence[Any], torch.dtype]
NUMBER: Info = ("number", [], torch.int64)
GOING: Info = ("going", [], torch.bool)


def body(
    inputs: Sequence[Info], write: Callable[[Writer], Sequence[tuple[str, torch.dtype]]]
) -> Any:
    """Return a sub-graph; its names are its own."""
    inner = Writer(18)
    results = write(inner)
    names = {name: f"body_{name}" for node in inner.nodes for name in node.output}
    for node in inner.nodes:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
        node.name = f"body_{node.name}"
    for stored in inner.initializers:
        names[stored.name] = stored.name
    infos = [
        [helper.make_tensor_value_info(n, TYPES[t], s) for n, s, t in inputs],
        [
            helper.make_tensor_value_info(names.get(name, name), TYPES[t], None)
            for name, t in results
        ],
    ]
    return helper.make_graph(inner.nodes, "body", *infos, inner.initializers)


def halves(w: Writer) -> Sequence[tuple[str, torch.dtype]]:
    """Write a round that halves a state, adds what is outside, and gives the sum as well."""
    half = w.node("Mul", "state", w.constant(0.5))
    y = w.node("Add", half, "outside")
    going = w.node("Identity", "going")
    return [(going, torch.bool), (y, torch.float32), (half, torch.float32)]


def until_small(w: Writer) -> Sequence[tuple[str, torch.dtype]]:
    """Write a round that goes on while the largest element is above 1."""
    y = w.node("Mul", "state", w.constant(0.5))
    largest = w.node("ReduceMax", y, keepdims=0)
    going = w.node("Greater", largest, w.constant(1.0))
    return [(going, torch.bool), (y, torch.float32), (y, torch.float32)]


def loop(count: Any, condition: Any, write: Any, **kinds: Any) -> Any:
    """Return a file with a loop; a count or condition that is a text is an input of this name."""
    w = Writer(18)
    x = w.input("x", [2, 3])
    w.nodes.append(helper.make_node("Exp", [x], ["outside"], "outside"))
    head = []
    for part, dtype in ((count, torch.int64), (condition, torch.bool)):
        if isinstance(part, str):
            head.append(w.input(part, [], dtype) if part else "")
        else:
            head.append(w.constant(part, dtype))
    inner = body([NUMBER, GOING, ("state", [2, 3], torch.float32)], write)
    return w.model(*w.node("Loop", *head, x, outputs=2, body=inner))


X = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) * 9


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("write", [halves, until_small])
@pytest.mark.parametrize("condition", ["", True])
def test_loops_with_a_count(count: int, write: Any, condition: Any) -> None:
    model = loop(count, condition, write)
    if write is until_small and condition == "":
        with pytest.raises(FrontendError, match="its condition is left out"):
            torchq.from_onnx(model)
    else:
        assert_agrees(model, {"x": X})


@pytest.mark.parametrize("start", [True, False])
def test_loops_with_a_condition(start: bool) -> None:
    feeds = {"x": X, "start": torch.tensor(start)}
    assert_agrees(loop("", "start", until_small), feeds)
    read = assert_agrees(loop(9, "start", until_small), feeds)
    assert 1 < len(read(X, torch.tensor(True))[1]) < 9


@pytest.mark.parametrize("count", [0, 3])
def test_loops_with_a_computed_count(count: int) -> None:
    feeds = {"x": X, "count": torch.tensor(count)}
    assert_agrees(loop("count", "", halves), feeds)


@pytest.mark.parametrize("dynamo", [True, False], ids=["export", "torchscript"])
def test_loops_of_the_data_are_not_exported(dynamo: bool, tmp_path: Path) -> None:
    """A trace would hold the rounds of its example."""
    read = torchq.from_onnx(loop("count", "", halves))
    warnings.filterwarnings("ignore", ".*has no active quantizer")
    with pytest.raises(TorchExportError, match=r"Loop 'Loop_.*how often it runs"):
        torchq.export_onnx(
            read, (X, torch.tensor(2)), tmp_path / "m.onnx", dynamo=dynamo
        )


def test_a_loop_without_an_end_is_refused() -> None:
    with pytest.raises(FrontendError, match="neither a count nor a condition"):
        torchq.from_onnx(loop("", "", halves))


def running_sums(w: Writer) -> Sequence[tuple[str, torch.dtype]]:
    total = w.node("Add", w.node("Add", "state", "first"), "second")
    results = total, w.node("Neg", total), w.node("Identity", total)
    return [(result, torch.float32) for result in results]


@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scans(axis: int, backwards: int) -> None:
    w = Writer(18)
    sizes = [2, 4]
    sizes.insert(axis if axis >= 0 else 2, 5)
    inputs = [w.input("start", [2, 4]), w.input("a", sizes), w.input("b", [5, 2, 4])]
    infos = [(name, [2, 4], torch.float32) for name in ("state", "first", "second")]
    options = {
        "scan_input_axes": [axis, 0],
        "scan_input_directions": [backwards, 1],
        "scan_output_axes": [axis, 0],
        "scan_output_directions": [0, backwards],
    }
    inner = body(infos, running_sums)
    results = w.node(
        "Scan", *inputs, outputs=3, num_scan_inputs=2, body=inner, **options
    )
    generator = torch.Generator().manual_seed(1)
    shapes = {"start": [2, 4], "a": sizes, "b": [5, 2, 4]}
    feeds = {name: torch.randn(s, generator=generator) for name, s in shapes.items()}
    assert_agrees(w.model(*results), feeds)


def test_a_scan_of_opset_8_is_refused() -> None:
    w = Writer(8)
    parts = w.input("start", [1, 2]), w.input("a", [1, 5, 2])
    infos = [(name, [2], torch.float32) for name in ("state", "first")]

    def write(inner: Writer) -> Sequence[tuple[str, torch.dtype]]:
        return [(inner.node("Add", "state", "first"), torch.float32)]

    y = w.node("Scan", "", *parts, num_scan_inputs=1, body=body(infos, write))
    with pytest.raises(FrontendError, match="opset 8, where a Scan has a batch"):
        torchq.from_onnx(w.model(y))


def mixing(w: Writer) -> Sequence[tuple[str, torch.dtype]]:
    """Write a round of a convolution with a weight of its own."""
    weight = w.random(4, 4, 3, 3, name="inner.weight")
    y = w.node("Relu", w.node("Conv", "state", weight, pads=[1, 1, 1, 1]))
    going = w.node("Identity", "going")
    return [(going, torch.bool), (w.node("Add", y, "state"), torch.float32)]


@pytest.mark.parametrize(
    "dynamo",
    [True, pytest.param(False, marks=pytest.mark.slow, id="torchscript")],
)
def test_a_loop_on_the_road_to_a_quantized_file(dynamo: bool, tmp_path: Path) -> None:
    w = Writer(18)
    y = w.conv(w.input("x", ["n", 3, 9, 9]), 3, 4)
    infos = [NUMBER, GOING, ("state", ["n", 4, 9, 9], torch.float32)]
    y = w.node("Loop", w.constant(2), "", y, body=body(infos, mixing))
    model = w.model(w.conv(y, 4, 4))
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(count, 3, 9, 9, generator=generator) for count in (2, 3)]
    read = assert_agrees(model, {"x": batches[0]})
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(read, config, target="onnxruntime", example=batches[0])
    inner = [m for n, m in read.named_modules() if n.endswith("inner")]
    assert any(isinstance(module, torchq.nn.QuantConv2d) for module in inner)
    torchq.calibrate(read, batches, progress=False)
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options: dict[str, Any] = {"target": "onnxruntime", "dynamo": dynamo}
        torchq.export_onnx(read, batches[0], path, **options)
    report = torchq.verify_onnx(read, path, batches)
    assert report.ok, report
