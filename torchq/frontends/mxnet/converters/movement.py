"""Shapes, slices and look-ups as MXNet defines them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchq.frontends.building.functions import (
    depth_to_space,
    permuted,
    slice_axis,
    space_to_depth,
)
from torchq.frontends.building.graph import Value
from torchq.frontends.mxnet.node import SymbolContext, converter, operator

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
    return node.call(reshape, node.inputs[0], codes, reverse)


@converter("squeeze")
def _squeeze(node: SymbolContext) -> Value:
    axes = node.ints("axis", [])
    return node.call(torch.squeeze, node.inputs[0], *([tuple(axes)] if axes else []))


@converter("Concat", "concat")
def _concat(node: SymbolContext) -> Value:
    return node.call(torch.cat, list(node.inputs), node.integer("dim", 1))


@converter("stack")
def _stack(node: SymbolContext) -> Value:
    return node.call(torch.stack, list(node.inputs), node.integer("axis", 0))


@converter("SliceChannel", "split", "_split_v2")
def _split(node: SymbolContext) -> list[Value]:
    squeezed = node.flag("squeeze_axis", False)
    where: int | list[int]
    if node.op_type == "_split_v2":
        axis, sections = node.integer("axis", 0), node.integer("sections", 0)
        indices = node.ints("indices", [])
        count, where = sections or len(indices), sections or indices[1:]  # the first one is 0
    else:
        axis, count = node.integer("axis", 1), node.integer("num_outputs")
        where = count
    if not 0 < count < _LARGEST:
        node.refuse(f"it has {count} outputs; expected a positive number")
    parts = node.call_parts(count, torch.tensor_split, node.inputs[0], where, axis)
    return [node.call(torch.squeeze, part, axis) if squeezed else part for part in parts]


@converter("slice", "crop")
def _slice(node: SymbolContext) -> Value:
    begin, end, stride = node.ints("begin"), node.ints("end"), node.ints("step", [])
    if len(begin) != len(end):
        node.refuse(f"begin is {begin} and end {end}; expected equally many")
    return node.call(slice_each, node.inputs[0], begin, end, stride)


@converter("slice_axis")
def _slice_axis(node: SymbolContext) -> Value:
    end = None if node.attr("end") is None else node.integer("end")
    axis, begin = node.integer("axis"), node.integer("begin")
    return node.call(slice_axis, node.inputs[0], axis, begin, end, 1)


@converter("take")
def _take(node: SymbolContext) -> Value:
    mode = node.text("mode", "clip")
    if mode not in ("clip", "wrap"):
        node.refuse(f"mode is {mode!r}; expected clip or wrap")
    return node.call(take, *node.inputs, node.integer("axis", 0), mode == "wrap")


@converter("_zeros", "_ones", "_full")
def _filled(node: SymbolContext) -> Value:
    shape, dtype = node.ints("shape"), node.dtype("dtype")
    if not 0 < math.prod(shape) <= _LARGEST:
        node.refuse(f"its shape is {shape}; expected at most {_LARGEST} elements")
    value = {"_zeros": 0.0, "_ones": 1.0}.get(node.op_type)
    value = node.number("value") if value is None else value
    return node.call(torch.full, shape, value, dtype=dtype)


@converter("_arange")
def _arange(node: SymbolContext) -> Value:
    start, each = node.number("start", 0.0), node.number("step", 1.0)
    repeat = node.integer("repeat", 1)
    stop = None if node.attr("stop") is None else node.number("stop")
    node.expect("infer_range", "False", "0")
    first, last = (0.0, start) if stop is None else (start, stop)
    if not each or not 0 <= (last - first) / each * repeat <= _LARGEST:
        node.refuse(f"got a range from {first} to {last}; expected at most {_LARGEST} elements")
    found = node.call(torch.arange, first, last, each, dtype=node.dtype("dtype"))
    return found if repeat == 1 else node.call(torch.repeat_interleave, found, repeat)


def reshape(x: Tensor, codes: Sequence[int], reverse: bool) -> Tensor:
    """Return ``x`` in the shape that codes describe, matched from the right if ``reverse``.

    A positive code is a size; 0 keeps a size, -1 is the rest, -2 keeps all remaining sizes, -3
    merges two, -4 splits one into the two sizes that follow, one of which may be -1.
    """
    sizes = list(x.shape)
    if not reverse:
        return x.reshape(_decoded(list(codes), sizes))
    return x.reshape(_decoded(list(codes)[::-1], sizes[::-1])[::-1])


def _decoded(codes: list[int], sizes: list[int]) -> list[int]:
    result: list[int] = []
    at, place = 0, 0
    while place < len(codes):
        code = codes[place]
        if code == -2:
            result += sizes[at:]
            at = len(sizes)
        elif code == -3:
            result.append(sizes[at] * sizes[at + 1])
            at += 2
        elif code == -4:
            left, right = codes[place + 1], codes[place + 2]
            left = sizes[at] // right if left == -1 else left
            result += [left, sizes[at] // left if right == -1 else right]
            at, place = at + 1, place + 2
        else:
            result.append(sizes[at] if code == 0 else code)
            at += 1
        place += 1
    return result


def slice_each(
    x: Tensor, begin: Sequence[int | None], end: Sequence[int | None], stride: Sequence[int | None]
) -> Tensor:
    """Return a slice of the first dimensions; a negative stride runs backwards."""
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        every = (stride[axis] if axis < len(stride) else None) or 1
        x = slice_axis(x, axis, first, last, every)
    return x


def slice_like(x: Tensor, like: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the first part of ``x``, of the size of ``like`` along ``axes``, by default all."""
    for axis in [axis % x.dim() for axis in axes] or range(x.dim()):
        x = x.narrow(axis, 0, like.shape[axis])
    return x


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` broadcast to ``shape``, where 0 keeps a size."""
    return x.expand([own if size == 0 else size for own, size in zip(x.shape, shape, strict=True)])


def rows(indices: Tensor, count: int) -> Tensor:
    """Return the rows of a table that indices of any type name; others name the first or last."""
    return indices.long().clamp(0, count - 1)


def take(x: Tensor, indices: Tensor, axis: int, wrap: bool) -> Tensor:
    """Return entries along ``axis``; indices outside are clipped, or counted around."""
    axis, size = axis % x.dim(), x.shape[axis]
    places = indices.long() % size if wrap else rows(indices, size)
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` where ``condition`` is not zero, else ``y``; a vector chooses whole rows."""
    chosen = condition != 0
    if chosen.dim() == 1 and x.dim() > 1:
        chosen = chosen.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(chosen, x, y)


operator("transpose", permuted, ("ints", "axes", []))
operator("SwapAxis swapaxes", torch.transpose, ("integer", "dim1", 0), ("integer", "dim2", 0))
operator("expand_dims", torch.unsqueeze, ("integer", "axis"))
operator("slice_like", slice_like, ("ints", "axes", []))
operator("tile", torch.tile, ("ints", "reps"))
operator("repeat", torch.repeat_interleave, ("integer", "repeats"), ("axis",))
operator("reverse flip", torch.flip, ("ints", "axis"))
operator("broadcast_to", broadcast_to, ("ints", "shape"))
operator("broadcast_like", torch.Tensor.expand_as)
operator("where", where)
operator("depth_to_space", depth_to_space, ("integer", "block_size"))
operator("space_to_depth", space_to_depth, ("integer", "block_size"))
