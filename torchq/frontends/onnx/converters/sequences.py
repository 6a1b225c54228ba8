"""Sequences of tensors whose number is known, as PyTorch wrote lists: they leave no trace."""

from collections.abc import Sequence
from typing import Any

import torch

from torchq.frontends.building.graph import Items, Value
from torchq.frontends.onnx.context import NodeContext, converter


def _items(node: NodeContext) -> list[Value]:
    """Return the tensors of the sequence that a node reads."""
    value = node.input(0)
    if not isinstance(value, Items):
        node.refuse("it reads no sequence of tensors whose number is known")
    return list(value.values)


def _place(node: NodeContext, index: int, count: int, default: int, end: int) -> int:
    """Return a place in ``count`` tensors, which must be known; the default if it is left out.

    Places are below ``end``; negative ones count from the last tensor.
    """
    if node.input(index) is None:
        return default
    numbers: Sequence[Any] = node.ints(index) or ()
    if len(numbers) != 1 or not isinstance(numbers[0], int):
        node.refuse("its place is computed by the network; expected a constant")
    (place,) = numbers
    if not -count <= place < end:
        node.refuse(f"its place is {place}; expected one of {end}")
    return int(place) + (count if place < 0 else 0)


@converter("SequenceConstruct", dtypes=None)
def _construct(node: NodeContext) -> Value:
    return Items(tuple(node.inputs))


@converter("SequenceEmpty", dtypes=None)
def _empty(node: NodeContext) -> Value:
    node.attr("dtype", 1)
    return Items(())


@converter("SequenceInsert", dtypes=None)
def _insert(node: NodeContext) -> Value:
    items = _items(node)
    count = len(items)
    items.insert(_place(node, 2, count, count, count + 1), node.inputs[1])
    return Items(tuple(items))


@converter("SequenceErase", dtypes=None)
def _erase(node: NodeContext) -> Value:
    items = _items(node)
    if not items:
        node.refuse("its sequence is empty")
    items.pop(_place(node, 1, len(items), len(items) - 1, len(items)))
    return Items(tuple(items))


@converter("SequenceAt", dtypes=None)
def _at(node: NodeContext) -> Value:
    items = _items(node)
    return items[_place(node, 1, len(items), 0, len(items))]


@converter("SequenceLength", dtypes=None)
def _length(node: NodeContext) -> Value:
    return node.sizes([len(_items(node))], True, torch.int64)


@converter("ConcatFromSequence", dtypes=None)
def _concat(node: NodeContext) -> Value:
    function = torch.stack if node.attr("new_axis", False) else torch.cat
    return node.call(function, _items(node), node.attr("axis", int))


@converter("SplitToSequence", dtypes=None)
def _split(node: NodeContext) -> Value:
    axis = node.attr("axis", 0)
    keep = node.attr("keepdims", True)
    shape = node.shape(0)
    size = None if shape is None else shape[axis]
    sizes: Any = node.ints(1)
    if node.input(1) is not None and sizes is None:
        node.refuse("its sizes are computed by the network; expected constants")
    if node.input(1) is None or node.shape(1) == []:
        if size is None:
            node.refuse(
                "the size that it splits is not known, nor is the number of parts"
            )
        each = 1 if sizes is None else int(sizes[0])
        sizes = [min(each, size - start) for start in range(0, size, each)]
    parts = node.call_parts(len(sizes), torch.split, node.inputs[0], sizes, axis)
    if node.input(1) is None and not keep:
        parts = [node.call(torch.squeeze, part, axis) for part in parts]
    return Items(tuple(parts))
