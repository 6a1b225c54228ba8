"""Files as old exporters wrote them, opset 7 to 13, against ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees, helper, run_reference

Case = tuple[Any, list[dict[str, Tensor]]]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def upsampled_by_computed_scales() -> Case:
    """PyTorch 1.2, opset 9: interpolate() of a size that the file leaves open."""
    w = Writer(9)
    x = w.input("x", ["n", 3, "h", "w"])
    y = w.node("Relu", w.conv(x, 3, 4, stride=2))
    scales = []
    for axis in (2, 3):
        size = w.node(
            "Gather",
            w.node("Shape", y),
            w.constant(axis),
            axis=0,
        )
        size = w.node("Cast", size, to=1)
        target = w.node("Floor", w.node("Mul", size, w.constant(2.0)))
        scales.append(w.node("Unsqueeze", w.node("Div", target, size), axes=[0]))
    ones = w.constant([1.0, 1.0])
    y = w.node("Upsample", y, w.node("Concat", ones, *scales, axis=0), mode="nearest")
    return w.model(y), [{"x": random(1, 3, 8, 12)}, {"x": random(2, 3, 10, 6)}]


def of_the_first_opsets() -> Case:
    """Caffe2 and MXNet, opset 7: attributes that later became inputs."""
    w = Writer(7)
    x = w.input("x", [2, 3, 9, 9])
    y = w.node("Pad", x, pads=[0, 0, 1, 0, 0, 0, 0, 1], mode="reflect")
    y = w.node(
        "Upsample",
        w.conv(y, 3, 6),
        scales=[1.0, 1.0, 2.0, 2.0],
        mode="nearest",
    )
    y = w.node("Clip", y, min=-0.5, max=0.75)
    y = w.node("LRN", y, size=3, alpha=1e-3, beta=0.75)
    y = w.node(
        "Slice",
        y,
        axes=[2, 3],
        starts=[1, -9],
        ends=[2**31 - 1, -1],
    )
    y = w.node("Dropout", y, ratio=0.3)
    pooled = w.node(
        "MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]
    )
    mean = w.node(
        "AveragePool",
        pooled,
        kernel_shape=[2, 2],
        strides=[2, 2],
        auto_pad="SAME_UPPER",
    )
    y = w.node("Sum", mean, mean, w.node("PRelu", mean, w.random(6, 1, 1)))
    top, _ = w.node("TopK", w.node("Flatten", y), outputs=2, k=5, axis=1)
    y = w.node(
        "Gemm",
        top,
        w.random(5, 4),
        w.random(4),
        alpha=0.5,
        beta=2.0,
    )
    y = w.node("Softmax", w.node("Reshape", y, w.constant([0, 2, -1])), axis=1)
    return w.model(y), [{"x": random(2, 3, 9, 9)}]


def with_the_layout_of_tensorflow() -> Case:
    """tf2onnx, opset 9: transposes, casts and sizes around the layers."""
    w = Writer(9)
    x = w.input("x", ["n", 10, 10, 3])
    y = w.node("Transpose", x, perm=[0, 3, 1, 2])
    y = w.node(
        "Conv",
        y,
        w.random(6, 3, 3, 3),
        auto_pad="SAME_UPPER",
        strides=[2, 2],
    )
    y = w.node(
        "Transpose", w.node("Transpose", y, perm=[0, 2, 3, 1]), perm=[0, 3, 1, 2]
    )
    y = w.node("Max", w.node("Mul", y, w.constant(0.2)), y)
    y = w.node("Transpose", y, perm=[0, 2, 3, 1])
    shape = w.node("Cast", w.node("Shape", y), to=6)
    batch = w.node(
        "Slice",
        shape,
        axes=[0],
        starts=[0],
        ends=[1],
    )
    batch = w.node(
        "Unsqueeze",
        w.node("Squeeze", batch, axes=[0]),
        axes=[0],
    )
    target = w.node("Concat", batch, w.constant([-1, 6], torch.int32), axis=0)
    y = w.node("Reshape", y, w.node("Cast", target, to=7))
    one = w.node(
        "Cast", w.node("Equal", w.node("ArgMax", y, axis=2), w.constant(0)), to=1
    )
    y = w.node("Mul", y, w.node("Sub", w.constant(1.0), one))
    return w.model(y, (shape, torch.int32)), [
        {"x": random(n, 10, 10, 3)} for n in (1, 3)
    ]


def of_two_stages() -> Case:
    """The second stage of a Faster R-CNN of opset 11: regions chosen and pooled in the graph."""
    w = Writer(11)
    x = w.input("x", [1, 3, 16, 16])
    y = w.node("Relu", w.conv(x, 3, 4))
    corners = random(1, 12, 2, seed=1) * 8
    boxes = torch.cat([corners, corners + 2 + random(1, 12, 2, seed=2) * 6], 2)
    flat = w.node(
        "Reshape", w.conv(y, 4, 3, kernel=1, stride=8), w.constant([1, 1, 12])
    )
    scores = w.node("Sigmoid", flat)
    # Fmt: skip.
    chosen = w.node(
        "NonMaxSuppression",
        w.weight(boxes, "boxes"),
        scores,
        w.constant([5]),
        w.constant([0.4]),
        w.constant([0.2]),
    )
    index = w.node("Squeeze", w.node("Slice", chosen, w.constant([2]), w.constant([3]),
                                     w.constant([1])), axes=[1])  # fmt: skip
    count = w.node(
        "Unsqueeze", w.node("Gather", w.node("Shape", index), w.constant(0)), axes=[0]
    )
    most = w.node(
        "ReduceMin", w.node("Concat", count, w.constant([3]), axis=0), keepdims=0
    )
    order = w.node(
        "Squeeze",
        w.node("Gather", scores, index, axis=2),
        axes=[0, 1],
    )
    _, best = w.node("TopK", order, w.node("Unsqueeze", most, axes=[0]), outputs=2)
    places = w.node("Gather", index, best)
    kept = w.node("Gather", w.node("Squeeze", "boxes", axes=[0]), places)
    zeros = w.node("ConstantOfShape", w.node("Shape", places),
                   value=helper.make_tensor("value", 7, [1], [0]))  # fmt: skip
    regions = w.node("RoiAlign", y, kept, zeros, output_height=3, output_width=3,
                     sampling_ratio=2, spatial_scale=1.0)  # fmt: skip
    mask = w.node("NonZero", w.node("Greater", order, w.constant(0.5)))
    above = w.node("GatherND", order, w.node("Transpose", mask, perm=[1, 0]))
    return w.model(regions, kept, above), [
        {"x": random(1, 3, 16, 16, seed=s)} for s in (3, 4)
    ]


def branch(name: str, *nodes: Any) -> Any:
    """Return a branch of an If, which gives the output of its own name."""
    result = helper.make_tensor_value_info(f"{name}_out", 1, None)
    return helper.make_graph(nodes, name, [], [result])


def squeezed_if_it_can_be() -> Case:
    """PyTorch 1.6, opset 11: squeeze(1) of a size that is not known is an If."""
    w = Writer(11)
    x = w.input("x", ["n", "c", 4])
    size = w.node(
        "Gather",
        w.node("Shape", x),
        w.constant(1),
    )
    one = w.node("Equal", w.constant(1), size)
    weight = w.random(4)
    squeezed = helper.make_node(
        "Squeeze",
        ["x"],
        ["a"],
        axes=[1],
    )
    then = branch(
        "then", squeezed, helper.make_node("Mul", ["a", weight], ["then_out"])
    )
    other = branch("else", helper.make_node("Add", ["x", weight], ["else_out"]))
    y = w.node("If", one, then_branch=then, else_branch=other)
    total = w.node("ReduceSum", y, keepdims=0)
    return w.model(y, total), [{"x": random(2, c, 4)} for c in (1, 3)]


def with_conditions_on_dimensions() -> Case:
    """PyTorch 1.13, opset 15: a recurrent layer asks for the number of dimensions of its input."""
    w = Writer(15)
    x = w.input("x", [2, "c", 4])
    size = w.node(
        "Gather",
        w.node("Shape", x),
        w.constant(1),
    )

    one = helper.make_node("Constant", [], ["one"], value_ints=[1])
    squeezed = branch(
        "then", one, helper.make_node("Squeeze", ["x", "one"], ["then_out"])
    )
    whole = branch("else", helper.make_node("Identity", ["x"], ["else_out"]))
    alone = w.node("Equal", size, w.constant(1))
    first = w.node("If", alone, then_branch=squeezed, else_branch=whole)
    shape = w.node("Shape", first)
    flat = w.node(
        "Equal",
        w.node("Size", shape),
        w.constant(2),
    )
    negated = w.node("Cast", w.node("Not", flat), to=9)
    relu = branch("a", helper.make_node("Relu", [first], ["a_out"]))
    negative = branch("b", helper.make_node("Neg", [first], ["b_out"]))
    y = w.node("If", negated, then_branch=relu, else_branch=negative)
    last = w.node("Cast", w.node("Gather", shape, w.constant(0)), to=1)
    model = w.model(w.node("Mul", w.node("ReduceSum", y, keepdims=0), last))
    return model, [{"x": random(2, c, 4) - 0.5} for c in (1, 3)]


def with_a_negative_size() -> Case:
    """PaddlePaddle, opset 12: a batch of -1, and a state of the size of the batch."""
    w = Writer(12)
    y = w.node(
        "Transpose",
        w.input("x", [-1, 5, 3]),
        perm=[1, 0, 2],
    )
    batch = w.node(
        "Slice", w.node("Shape", y), w.constant([1]), w.constant([2]), w.constant([0])
    )
    many = w.node(
        "Concat",
        w.constant([2]),
        batch,
        w.constant([1]),
        axis=0,
    )
    state = w.node("Tile", w.weight(torch.zeros(1, 1, 4)), many)
    weights = (
        w.random(2, 16, 3),
        w.random(2, 16, 4),
        w.random(2, 32),
    )
    y, *_ = w.node("LSTM", y, *weights, "", state, state, outputs=3, hidden_size=4,
                   direction="bidirectional")  # fmt: skip
    return w.model(y), [{"x": random(n, 5, 3)} for n in (1, 2)]


def with_boxes_without_an_area() -> Case:
    """Boxes that are points overlap nothing, not even each other."""
    w = Writer(11)
    boxes = w.input("boxes", [1, 4, 4])
    scores = w.input("scores", [1, 1, 4])
    limits = w.constant([9]), w.constant([0.5])
    y = w.node("NonMaxSuppression", boxes, scores, *limits)
    values = torch.tensor(
        [[[1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 2, 2], [0, 0, 2, 1.9]]]
    )
    return w.model((y, torch.int64)), [{"boxes": values, "scores": random(1, 1, 4)}]


def softmax_of_an_unknown_shape() -> Case:
    """A softmax of old opsets is over several axes, here of a tensor of unknown shape."""
    w = Writer(12)
    y = w.conv(w.input("x", ["n", 3, 17, 17]), 3, 4)
    shape = w.input("shape", [4], torch.int64)
    model = w.model(w.node("Softmax", w.node("Reshape", y, shape), axis=2))
    return model, [{"x": random(2, 3, 17, 17), "shape": torch.tensor([2, 4, 17, 17])}]


CASES: list[Callable[[], Case]] = [
    upsampled_by_computed_scales,
    of_the_first_opsets,
    with_the_layout_of_tensorflow,
    of_two_stages,
    squeezed_if_it_can_be,
    with_conditions_on_dimensions,
    with_a_negative_size,
    with_boxes_without_an_area,
    softmax_of_an_unknown_shape,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_files(case: Callable[[], Case]) -> None:
    model, batches = case()
    for feeds in batches:
        assert_agrees(model, feeds)


def test_a_condition_is_one_call_of_a_trace() -> None:
    model, (feeds, _) = squeezed_if_it_can_be()
    read = torchq.from_onnx(model)
    actual = torchq.graph.trace(read, feeds["x"])
    assert actual.level == "module"
    modules = actual.graph_module.modules()
    assert [type(module).__name__ for module in modules].count("Conditional") == 1
    assert torch.equal(
        actual.graph_module(feeds["x"])[0], run_reference(model, feeds)[0]
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("channels", [1, 3])
def test_conditions_on_dimensions_are_decided_by_exports(
    channels: int, tmp_path: Path
) -> None:
    model, batches = with_conditions_on_dimensions()
    (feeds,) = (feeds for feeds in batches if feeds["x"].shape[1] == channels)
    read = torchq.from_onnx(model)
    program = torch.export.export(read, (feeds["x"],))
    expected = run_reference(model, feeds)[0]
    torch.testing.assert_close(program.module()(feeds["x"]), expected)
    path = str(tmp_path / "again.onnx")
    torch.onnx.export(read, (feeds["x"],), path, dynamo=True, verbose=False)
    torch.testing.assert_close(run_reference(path, feeds)[0], expected)


@pytest.mark.filterwarnings("ignore")  # torch warns of its own loop over time
def test_states_of_zeros_can_be_exported(tmp_path: Path) -> None:
    """PyTorch 1.9, opset 12: an initial state that is one zero, expanded."""
    w = Writer(12)
    state = w.node("ConstantOfShape", w.constant([2, 1, 4]))
    weights = (
        w.random(2, 16, 3),
        w.random(2, 16, 4),
        w.random(2, 32),
    )
    x = w.input("x", ["t", 1, 3])
    y, *_ = w.node("LSTM", x, *weights, "", state, state, outputs=3, hidden_size=4,
                   direction="bidirectional")  # fmt: skip
    model = w.model(y)
    given = random(6, 1, 3)
    path = str(tmp_path / "again.onnx")
    read = torchq.from_onnx(model)
    assert all(buffer.is_contiguous() for buffer in read.buffers())

    def assert_same(x: Tensor) -> None:
        torch.testing.assert_close(
            run_reference(path, {"x": x}), run_reference(model, {"x": x})
        )

    torch.onnx.export(read, (given,), path, dynamo=True, verbose=False)
    assert_same(given)
    # Whether torch.export can leave the length open depends on its version.
    torchq.export_onnx(read, given, path, dynamo=False, dynamic_shapes={"x": {0: "t"}})
    assert_same(given)
    assert_same(random(9, 1, 3))
