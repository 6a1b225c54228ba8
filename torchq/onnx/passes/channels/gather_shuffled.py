"""Shuffled channels as a Gather, in one node for each tensor that is read."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    is_constant,
    is_output,
    nodes_of,
    readers,
    replace_value,
    value_of,
)
from torchq.onnx.passes.fold_shapes import Shape, known_shapes

__all__ = ["gather_shuffled"]

#: A value, and the indices of its channels before the shuffle.
_Part: TypeAlias = tuple[Value, Tensor]


def gather_shuffled(model: Model) -> None:
    """Write the channel shuffle of ShuffleNet as a Gather, together with the split behind it.

    ONNX Runtime computes integer convolutions with their channels last in memory, and does the same
    with a shuffle between them, which then transposes single bytes. It leaves a Gather as it is,
    which copies whole channels.

    Before::

        Reshape to (N, groups, channels, H, W) -> Transpose of groups and channels -> Reshape to
        (N, groups * channels, H, W) -> Slice or Split of the channels.

    After::

        A Gather for each part that is read.
    """
    found = [node for node in nodes_of(model, "Transpose") if _exchanges_groups(node)]
    shapes = known_shapes(model) if found else {}
    for node in found:
        part = _shuffled(node, shapes)
        if part is None:
            continue
        source = node.inputs[0].producer().inputs[0]
        for value, channels in _read_parts(*part):
            name = f"{value.name}/channels"
            indices = add_initializer(model.graph, name, channels)
            inputs = [source, indices]
            replace_value(value, add_node(value.producer(), "Gather", inputs, name, {"axis": 1}))


def _exchanges_groups(node: Node) -> bool:
    """Return True for the Transpose between two Reshapes that nothing else reads."""
    behind, before = readers(node.outputs[0]), node.inputs[0].producer()
    if list(attribute(node, "perm", ())) != [0, 2, 1, 3, 4] or before is None or len(behind) != 1:
        return False
    if len(readers(before.outputs[0])) != 1 or is_output(before.outputs[0]):
        return False
    return before.op_type == behind[0].op_type == "Reshape" and not is_output(node.outputs[0])


def _shuffled(node: Node, shapes: dict[str, Shape]) -> _Part | None:
    """Return the shuffled value and its channels, if the Reshapes change channels alone."""
    (behind,) = readers(node.outputs[0])
    source, middle, last = (
        shapes.get(str(value.name), ())
        for value in (node.inputs[0].producer().inputs[0], node.inputs[0], behind.outputs[0])
    )
    if len(source) != 4 or len(middle) != 5 or last[1:] != source[1:]:
        return None
    groups, channels = middle[1:3]
    if not isinstance(groups, int) or not isinstance(channels, int):
        return None
    if source[1:] != (groups * channels, *middle[3:]) or None in source[1:]:
        return None
    order = torch.arange(groups * channels).reshape(groups, channels).T.reshape(-1)
    return behind.outputs[0], order


def _read_parts(value: Value, channels: Tensor) -> list[_Part]:
    """Return the slices of a value if nothing else reads it, or else the value itself."""
    parts: list[_Part] = []
    for reader in readers(value):
        found = _parts_of(reader, channels)
        if not found:
            return [(value, channels)]
        parts += found
    return [(value, channels)] if is_output(value) else parts


def _parts_of(node: Node, channels: Tensor) -> list[_Part]:
    """Return what a Slice or Split of channels gives; nothing for other nodes."""
    if not all(value is None or is_constant(value) for value in node.inputs[1:]):
        return []
    if node.op_type == "Split" and attribute(node, "axis", 0) == 1:
        lengths = value_of(node.inputs[1]).tolist() if len(node.inputs) > 1 else None
        count = len(node.outputs)
        pieces = channels.split(lengths) if lengths else channels.tensor_split(count)
        return list(zip(node.outputs, pieces, strict=True))
    if node.op_type == "Slice" and len(node.inputs) > 3:
        start, end, axis = (value_of(value).tolist() for value in node.inputs[1:4])
        stride = value_of(node.inputs[4]).tolist() if len(node.inputs) > 4 else [1]
        if axis == [1] and stride == [1]:
            return [(node.outputs[0], channels[start[0] : end[0]])]
    return []
