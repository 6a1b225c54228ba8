"""Sequences of tensors in ONNX files, as PyTorch wrote lists: resolved while a file is read."""

from typing import Any

import pytest
import torch

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees
from torchq.errors import FrontendError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def lists(w: Writer, x: str) -> str:
    """Write a list that grows and shrinks, and its tensors put together."""
    parts = w.node("SplitToSequence", x, w.constant(4), axis=0)
    first, rest = (w.node("SequenceAt", parts, w.constant(i)) for i in (0, -1))
    made = w.node("SequenceConstruct", w.node("Neg", first), first)
    made = w.node("SequenceInsert", made, w.node("Abs", first), w.constant(-1))
    made = w.node("SequenceInsert", made, first)
    made = w.node("SequenceErase", made, w.constant(0))
    both = w.node("ConcatFromSequence", made, axis=1)
    stacked = w.node("ConcatFromSequence", made, axis=-1, new_axis=1)
    count = w.node("Cast", w.node("SequenceLength", made), to=1)
    sums = [w.node("ReduceSum", y, keepdims=0) for y in (both, stacked, rest)]
    total = w.node(
        "Add", w.node("Add", sums[0], sums[1]), w.node("Mul", sums[2], count)
    )
    return str(w.node("Mul", total, both))


def test_lists_compute_what_the_runtime_does() -> None:
    w = Writer(17)
    read = assert_agrees(w.model(lists(w, w.input("x", [6, 4]))), {"x": X})
    assert not any("equence" in str(node.target) for node in read.graph.nodes)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (None, {"axis": 1}),
        (None, {"axis": 1, "keepdims": 0}),
        (3, {"axis": 1}),
        ([1, 3], {"axis": -1}),
    ],
)
def test_parts_of_a_tensor(sizes: Any, options: dict[str, int]) -> None:
    w = Writer(17)
    given = [] if sizes is None else [w.constant(sizes)]
    parts = w.node("SplitToSequence", w.input("x", ["n", 4]), *given, **options)
    ends = [w.node("SequenceAt", parts, w.constant(place)) for place in (0, -1)]
    assert_agrees(w.model(*ends), {"x": X})


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("size", "SplitToSequence .* the size that it splits is not known"),
        ("place", "SequenceAt .*: its place is computed by the network"),
        ("beyond", "SequenceAt .*: its place is 2; expected one of 2"),
        ("tensor", "Relu .*: it reads a sequence; expected a tensor"),
    ],
)
def test_what_is_not_known_is_refused(case: str, text: str) -> None:
    w = Writer(17)
    x = w.input("x", ["n", 4])
    place = w.input("place", [], torch.int64)
    made = w.node("SequenceConstruct", x, x)
    if case == "size":
        y = w.node("SequenceAt", w.node("SplitToSequence", x), w.constant(0))
    elif case == "tensor":
        y = w.node("Relu", made)
    else:
        y = w.node("SequenceAt", made, place if case == "place" else w.constant(2))
    with pytest.raises(FrontendError, match=text):
        torchq.from_onnx(w.model(y))
