"""Shapes, slices, joins and look-ups."""

from __future__ import annotations

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import movement
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

_LARGEST = 2**26


@converter("Flatten", "flatten")
def _flatten(node: SymbolContext) -> Value:
    return node.module(nn.Flatten(), node.inputs[0])


@converter("Reshape", "reshape")
def _reshape(node: SymbolContext) -> Value:
    codes, reverse = node.ints("shape"), node.flag("reverse", False)
    node.expect("target_shape", "()", "(0, 0)", "(0,0)")
    node.attr("keep_highest")
    if codes == [0, -1] and not reverse:
        return node.call(torch.flatten, node.inputs[0], 1)
    return node.call(movement.reshape, node.inputs[0], codes, reverse)


@converter("reshape_like")
def _reshape_like(node: SymbolContext) -> Value:
    for name in ("lhs_begin", "lhs_end", "rhs_begin", "rhs_end"):
        node.expect(name)
    return node.call(movement.reshape_like, *node.inputs)


@converter("transpose")
def _transpose(node: SymbolContext) -> Value:
    return node.call(movement.transpose, node.inputs[0], node.ints("axes", []))


@converter("SwapAxis", "swapaxes")
def _swap_axes(node: SymbolContext) -> Value:
    return node.call(
        torch.transpose, node.inputs[0], node.integer("dim1", 0), node.integer("dim2", 0)
    )


@converter("expand_dims")
def _expand_dims(node: SymbolContext) -> Value:
    return node.call(torch.unsqueeze, node.inputs[0], node.integer("axis"))


@converter("squeeze")
def _squeeze(node: SymbolContext) -> Value:
    axes = node.ints("axis", [])
    return node.call(torch.squeeze, node.inputs[0], *([tuple(axes)] if axes else []))


@converter("Concat", "concat", "_rnn_param_concat")
def _concat(node: SymbolContext) -> Value:
    return node.call(torch.cat, list(node.inputs), node.integer("dim", 1))


@converter("stack")
def _stack(node: SymbolContext) -> Value:
    return node.call(torch.stack, list(node.inputs), node.integer("axis", 0))


@converter("SliceChannel", "split")
def _split(node: SymbolContext) -> list[Value]:
    count, axis = node.integer("num_outputs"), node.integer("axis", 1)
    squeezed = node.flag("squeeze_axis", False)
    if not 0 < count < _LARGEST:
        node.refuse(f"num_outputs is {count}; expected a positive number")
    parts = node.call_parts(count, torch.tensor_split, node.inputs[0], count, axis)
    return [node.call(torch.squeeze, part, axis) if squeezed else part for part in parts]


@converter("_split_v2")
def _split_v2(node: SymbolContext) -> list[Value]:
    axis, squeezed = node.integer("axis", 0), node.flag("squeeze_axis", False)
    sections, indices = node.integer("sections", 0), node.ints("indices", [])
    count = sections or len(indices)
    where = sections or indices[1:]  # the first index is always 0
    parts = node.call_parts(count, torch.tensor_split, node.inputs[0], where, axis)
    return [node.call(torch.squeeze, part, axis) if squeezed else part for part in parts]


@converter("slice", "crop")
def _slice(node: SymbolContext) -> Value:
    begin, end, stride = node.ints("begin"), node.ints("end"), node.ints("step", [])
    if len(begin) != len(end):
        node.refuse(f"begin is {begin} and end {end}; expected equally many")
    return node.call(movement.slice_each, node.inputs[0], begin, end, stride)


@converter("slice_axis")
def _slice_axis(node: SymbolContext) -> Value:
    end = None if node.attr("end") is None else node.integer("end")
    return node.call(
        movement.slice_axis, node.inputs[0], node.integer("axis"), node.integer("begin"), end
    )


@converter("slice_like")
def _slice_like(node: SymbolContext) -> Value:
    return node.call(movement.slice_like, *node.inputs, node.ints("axes", []))


@converter("tile")
def _tile(node: SymbolContext) -> Value:
    return node.call(torch.tile, node.inputs[0], node.ints("reps"))


@converter("repeat")
def _repeat(node: SymbolContext) -> Value:
    axis = None if node.attr("axis") is None else node.integer("axis")
    return node.call(torch.repeat_interleave, node.inputs[0], node.integer("repeats"), axis)


@converter("reverse", "flip")
def _reverse(node: SymbolContext) -> Value:
    return node.call(movement.reverse, node.inputs[0], node.ints("axis"))


@converter("broadcast_to")
def _broadcast_to(node: SymbolContext) -> Value:
    return node.call(movement.broadcast_to, node.inputs[0], node.ints("shape"))


@converter("broadcast_axis", "broadcast_axes")
def _broadcast_axis(node: SymbolContext) -> Value:
    return node.call(movement.broadcast_axis, node.inputs[0], node.ints("axis"), node.ints("size"))


@converter("broadcast_like")
def _broadcast_like(node: SymbolContext) -> Value:
    axes = node.ints("lhs_axes", []), node.ints("rhs_axes", [])
    return node.call(movement.broadcast_like, *node.inputs, *axes)


@converter("where")
def _where(node: SymbolContext) -> Value:
    return node.call(movement.where, *node.inputs)


@converter("take")
def _take(node: SymbolContext) -> Value:
    mode = node.text("mode", "clip")
    if mode not in ("clip", "wrap"):
        node.refuse(f"mode is {mode!r}; expected clip or wrap")
    return node.call(movement.take, *node.inputs, node.integer("axis", 0), mode == "wrap")


@converter("pick")
def _pick(node: SymbolContext) -> Value:
    wrap, keepdims = node.text("mode", "clip") == "wrap", node.flag("keepdims", False)
    return node.call(movement.pick, *node.inputs, node.integer("axis", -1), keepdims, wrap)


@converter("gather_nd")
def _gather_nd(node: SymbolContext) -> Value:
    return node.call(movement.gather_nd, *node.inputs)


@converter("one_hot")
def _one_hot(node: SymbolContext) -> Value:
    depth = node.integer("depth")
    if not 0 < depth <= _LARGEST:
        node.refuse(f"depth is {depth}; expected at most {_LARGEST}")
    values = node.number("on_value", 1.0), node.number("off_value", 0.0)
    return node.call(movement.one_hot, node.inputs[0], depth, *values, node.dtype("dtype"))


@converter("depth_to_space", "space_to_depth")
def _space_and_depth(node: SymbolContext) -> Value:
    function = movement.depth_to_space if node.op_type[0] == "d" else movement.space_to_depth
    return node.call(function, node.inputs[0], node.integer("block_size"))


@converter("_zeros", "_ones", "_full")
def _filled(node: SymbolContext) -> Value:
    shape, dtype = node.ints("shape"), node.dtype("dtype")
    count = 1
    for size in shape:
        count *= size
    if not 0 < count <= _LARGEST:
        node.refuse(f"its shape is {shape}; expected at most {_LARGEST} elements")
    value = {"_zeros": 0.0, "_ones": 1.0}.get(node.op_type)
    value = node.number("value") if value is None else value
    return node.call(torch.full, shape, value, dtype=dtype)


@converter("_arange")
def _arange(node: SymbolContext) -> Value:
    start, repeat, each = (
        node.number("start", 0.0),
        node.integer("repeat", 1),
        node.number("step", 1.0),
    )
    stop = None if node.attr("stop") is None else node.number("stop")
    node.expect("infer_range", "False", "0")
    first, last = (0.0, start) if stop is None else (start, stop)
    if not each or not 0 <= (last - first) / each * repeat <= _LARGEST:
        node.refuse(f"got a range from {first} to {last}; expected at most {_LARGEST} elements")
    found = node.call(torch.arange, first, last, each, dtype=node.dtype("dtype"))
    return found if repeat == 1 else node.call(torch.repeat_interleave, found, repeat)
