"""Operators that change the shape of a tensor or move its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.frontends.building import Constant, Ints, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions import movement
from torchq.frontends.onnx.registry import converter


@converter("Reshape", dtypes=None)
def _reshape(node: NodeContext) -> Value:
    sizes, allow_zero = node.ints(1), bool(node.attr("allowzero", 0))
    if sizes is None:
        return node.call(movement.reshape, node.inputs[0], node.inputs[1], allow_zero)
    if isinstance(node.inputs[0], Ints) and sizes in ([-1], [1], []):
        return node.sizes(node.inputs[0].items, scalar=not sizes)
    shape = list(sizes)
    if not allow_zero:
        shape = [node.size(0, axis) if size == 0 else size for axis, size in enumerate(sizes)]
    return node.call(torch.reshape, node.inputs[0], shape)


@converter("Transpose", dtypes=None)
def _transpose(node: NodeContext) -> Value:
    order = node.attr("perm")
    if order is None:
        return node.call(movement.transpose, node.inputs[0])
    result = node.call(torch.permute, node.inputs[0], list(order))
    value = node.inputs[0]
    if isinstance(value, Constant) and isinstance(result, Constant):
        result = Constant(result.tensor, "", value.name or value.origin)
        found = node.builder.weights.get(value)
        if found is not None:
            node.builder.weights[result] = found.permuted(order)
    return result


@converter("Flatten", dtypes=None)
def _flatten(node: NodeContext) -> Value:
    axis = node.attr("axis", 1)
    if axis == 1 and len(node.shape(0) or ()) > 1:
        return node.module(torch.nn.Flatten(), node.inputs[0])
    return node.call(flatten_at, node.inputs[0], axis)


def flatten_at(x: Tensor, axis: int) -> Tensor:
    """Return a matrix: the dimensions before ``axis`` are its rows, the rest its columns."""
    axis = axis + x.dim() if axis < 0 else axis
    rows, columns = 1, 1
    for size in x.shape[:axis]:
        rows = rows * size
    for size in x.shape[axis:]:
        columns = columns * size
    return x.reshape(rows, columns)


@converter("Squeeze", dtypes=None)
def _squeeze(node: NodeContext) -> Value:
    axes = node.axes()
    if isinstance(node.inputs[0], Ints):
        value = node.inputs[0]
        return node.sizes(value.items, scalar=len(value.items) == 1 and not value.scalar)
    if axes is None:
        shape = node.shape(0)
        if shape is not None and None not in shape:
            axes = [axis for axis, size in enumerate(shape) if size == 1]
        else:
            return node.call(torch.squeeze, node.inputs[0])
    return node.call(torch.squeeze, node.inputs[0], axes)


@converter("Unsqueeze", dtypes=None)
def _unsqueeze(node: NodeContext) -> Value:
    axes = node.axes()
    if axes is None:
        node.refuse("its axes are missing")
    if isinstance(node.inputs[0], Ints) and node.inputs[0].scalar and len(axes) == 1:
        return node.sizes(node.inputs[0].items)
    if min(axes) < 0 and len(axes) > 1:
        ndim = node.ndim(0) + len(axes)
        axes = [axis % ndim for axis in axes]
    result = node.inputs[0]
    for axis in sorted(axes):
        result = node.call(torch.unsqueeze, result, axis)
    return result


@converter("Concat", dtypes=None)
def _concat(node: NodeContext) -> Value:
    parts = [node.ints(index) for index in range(len(node.inputs))]
    if any(isinstance(value, Ints) for value in node.inputs) and None not in parts:
        return node.sizes([item for part in parts for item in part or ()])
    return node.call(torch.cat, list(node.inputs), node.required("axis"))


@converter("Split", dtypes=None)
def _split(node: NodeContext) -> list[Value]:
    axis, count = node.attr("axis", 0), len(node.output_names)
    sizes: Any = node.attr("split")
    if sizes is None and node.input(1) is not None:
        sizes = node.ints(1) if node.ints(1) is not None else node.inputs[1]
    if isinstance(node.inputs[0], Ints) and isinstance(sizes, list):
        items, result = list(node.inputs[0].items), []
        for size in sizes:
            result.append(node.sizes(items[:size]))
            items = items[size:]
        return result
    shape = node.shape(0)
    size = shape[axis] if shape is not None else None
    if sizes is None and size is not None and size % count == 0:
        return node.call_parts(count, torch.split, node.inputs[0], size // count, axis)
    if isinstance(sizes, list):
        return node.call_parts(count, torch.split, node.inputs[0], list(sizes), axis)
    return node.call_parts(count, movement.split, node.inputs[0], sizes, count, axis)


@converter("Slice", dtypes=None)
def _slice(node: NodeContext) -> Value:
    starts_, ends_ = node.ints(1), node.ints(2)
    axes_ = node.ints(3) if node.input(3) is not None else list(range(len(starts_ or ())))
    steps_ = node.ints(4) if node.input(4) is not None else [1] * len(starts_ or ())
    if starts_ is None or ends_ is None or axes_ is None or steps_ is None:
        rest = [node.input(i) for i in range(1, 5)]
        return node.call(movement.slice_by_tensors, node.inputs[0], *rest)
    return _sliced(node, starts_, ends_, axes_, steps_)


def _sliced(
    node: NodeContext, starts: list[Any], ends: list[Any], axes: list[Any], steps: list[Any]
) -> Value:
    value = node.inputs[0]
    numbers = all(isinstance(item, int) for item in (*starts, *ends, *axes, *steps))
    if isinstance(value, Ints) and numbers and len(starts) == 1:
        return node.sizes(value.items[_slice_of(starts[0], ends[0], steps[0])])
    if numbers and node.shape(0) is not None and all(step > 0 for step in steps):
        index = [slice(None)] * node.ndim(0)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            index[axis] = _slice_of(start, end, step)
        while index and index[-1] == slice(None):
            index.pop()
        return node.call(_getitem, value, tuple(index)) if index else value
    return node.call(movement.slice_axes, value, starts, ends, axes, steps)


def _getitem(x: Any, index: Any) -> Any:
    return x[index]


def _slice_of(start: int, end: int, step: int) -> slice:
    """Return a Python slice: ONNX writes very large numbers for an open end."""
    stop = None if abs(end) >= 2**31 - 1 or (end < 0 and step < 0) else end
    begin = None if start == 0 and step == 1 else start
    return slice(begin, stop, None if step == 1 else step)


@converter("Expand", dtypes=None)
def _expand(node: NodeContext) -> Value:
    sizes = node.ints(1)
    if (
        isinstance(node.inputs[0], Constant)
        and sizes is not None
        and all(isinstance(s, int) for s in sizes)
    ):
        return node.call(movement.expand, node.inputs[0], sizes)
    return node.call(movement.expand, node.inputs[0], node.inputs[1] if sizes is None else sizes)


@converter("Tile", dtypes=None)
def _tile(node: NodeContext) -> Value:
    counts = node.ints(1)
    return node.call(movement.tile, node.inputs[0], node.inputs[1] if counts is None else counts)


@converter("Pad")
def _pad(node: NodeContext) -> Value:
    mode = node.attr("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        node.refuse(f"the mode {mode!r} is not known")
    pads = node.ints(1)
    axes = node.known_ints(3, "axes") if node.input(3) is not None else None
    fill = node.constant(2)
    value = node.input(2) if fill is None else fill.reshape(-1)[0].item()
    arguments = (node.inputs[1] if pads is None else pads, value, axes, mode)
    return node.call(movement.pad, node.inputs[0], *arguments)


@converter("DepthToSpace")
def _depth_to_space(node: NodeContext) -> Value:
    block, crd = node.required("blocksize"), node.attr("mode", "DCR") == "CRD"
    if crd:
        return node.module(torch.nn.PixelShuffle(block), node.inputs[0])
    return node.call(movement.depth_to_space, node.inputs[0], block, False)


@converter("SpaceToDepth")
def _space_to_depth(node: NodeContext) -> Value:
    block, crd = node.required("blocksize"), node.attr("mode", "DCR") == "CRD"
    return node.call(movement.space_to_depth, node.inputs[0], block, crd)


@converter("Trilu")
def _trilu(node: NodeContext) -> Value:
    known = node.constant(1)
    k = node.input(1) if known is None and node.input(1) is not None else int(known or 0)
    return node.call(movement.triangle, node.inputs[0], k, bool(node.attr("upper", 1)))
