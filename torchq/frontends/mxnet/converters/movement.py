"""Shapes, slices and look-ups as MXNet defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchq.frontends.building.graph import Value
from torchq.frontends.mxnet.node import SymbolContext, converter

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


@converter("reshape_like")
def _reshape_like(node: SymbolContext) -> Value:
    for name in ("lhs_begin", "lhs_end", "rhs_begin", "rhs_end"):
        node.expect(name)
    return node.call(reshape_like, *node.inputs)


@converter("transpose")
def _transpose(node: SymbolContext) -> Value:
    return node.call(transpose, node.inputs[0], node.ints("axes", []))


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
    return node.call(slice_each, node.inputs[0], begin, end, stride)


@converter("slice_axis")
def _slice_axis(node: SymbolContext) -> Value:
    end = None if node.attr("end") is None else node.integer("end")
    return node.call(slice_axis, node.inputs[0], node.integer("axis"), node.integer("begin"), end)


@converter("slice_like")
def _slice_like(node: SymbolContext) -> Value:
    return node.call(slice_like, *node.inputs, node.ints("axes", []))


@converter("tile")
def _tile(node: SymbolContext) -> Value:
    return node.call(torch.tile, node.inputs[0], node.ints("reps"))


@converter("repeat")
def _repeat(node: SymbolContext) -> Value:
    axis = None if node.attr("axis") is None else node.integer("axis")
    return node.call(torch.repeat_interleave, node.inputs[0], node.integer("repeats"), axis)


@converter("reverse", "flip")
def _reverse(node: SymbolContext) -> Value:
    return node.call(reverse, node.inputs[0], node.ints("axis"))


@converter("broadcast_to")
def _broadcast_to(node: SymbolContext) -> Value:
    return node.call(broadcast_to, node.inputs[0], node.ints("shape"))


@converter("broadcast_axis", "broadcast_axes")
def _broadcast_axis(node: SymbolContext) -> Value:
    return node.call(broadcast_axis, node.inputs[0], node.ints("axis"), node.ints("size"))


@converter("broadcast_like")
def _broadcast_like(node: SymbolContext) -> Value:
    axes = node.ints("lhs_axes", []), node.ints("rhs_axes", [])
    return node.call(broadcast_like, *node.inputs, *axes)


@converter("where")
def _where(node: SymbolContext) -> Value:
    return node.call(where, *node.inputs)


@converter("take")
def _take(node: SymbolContext) -> Value:
    mode = node.text("mode", "clip")
    if mode not in ("clip", "wrap"):
        node.refuse(f"mode is {mode!r}; expected clip or wrap")
    return node.call(take, *node.inputs, node.integer("axis", 0), mode == "wrap")


@converter("pick")
def _pick(node: SymbolContext) -> Value:
    wrap, keepdims = node.text("mode", "clip") == "wrap", node.flag("keepdims", False)
    return node.call(pick, *node.inputs, node.integer("axis", -1), keepdims, wrap)


@converter("gather_nd")
def _gather_nd(node: SymbolContext) -> Value:
    return node.call(gather_nd, *node.inputs)


@converter("one_hot")
def _one_hot(node: SymbolContext) -> Value:
    depth = node.integer("depth")
    if not 0 < depth <= _LARGEST:
        node.refuse(f"depth is {depth}; expected at most {_LARGEST}")
    values = node.number("on_value", 1.0), node.number("off_value", 0.0)
    return node.call(one_hot, node.inputs[0], depth, *values, node.dtype("dtype"))


@converter("depth_to_space", "space_to_depth")
def _space_and_depth(node: SymbolContext) -> Value:
    function = depth_to_space if node.op_type[0] == "d" else space_to_depth
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


def reshape(x: Tensor, codes: Sequence[int], reverse: bool) -> Tensor:
    """Return ``x`` in the shape that codes describe.

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


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` in the shape of ``like``."""
    return x.reshape(like.shape)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return ``x`` with its dimensions in the order ``axes``, reversed where there are none."""
    return x.permute(list(axes) or list(reversed(range(x.dim()))))


def slice_each(
    x: Tensor, begin: Sequence[int | None], end: Sequence[int | None], stride: Sequence[int | None]
) -> Tensor:
    """Return a slice of the first dimensions; a negative stride runs backwards."""
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        every = (stride[axis] if axis < len(stride) else None) or 1
        x = _sliced(x, axis, first, last, every)
    return x


def _sliced(x: Tensor, axis: int, first: int | None, last: int | None, every: int) -> Tensor:
    if every > 0:
        return x[(slice(None),) * axis + (slice(first, last, every),)]
    places = range(*slice(first, last, every).indices(x.shape[axis]))
    return x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))


def slice_axis(x: Tensor, axis: int, begin: int, end: int | None) -> Tensor:
    """Return a slice of one dimension."""
    return _sliced(x, axis % x.dim(), begin, end, 1)


def slice_like(x: Tensor, like: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the first part of ``x``, of the size of ``like`` along ``axes``, by default all."""
    for axis in [axis % x.dim() for axis in axes] or range(x.dim()):
        x = x.narrow(axis, 0, like.shape[axis])
    return x


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` broadcast to ``shape``, where 0 keeps a size."""
    return x.expand([own if size == 0 else size for own, size in zip(x.shape, shape, strict=True)])


def broadcast_axis(x: Tensor, axes: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return ``x`` repeated along axes of size 1."""
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return x.expand(shape)


def broadcast_like(
    x: Tensor, like: Tensor, axes: Sequence[int], like_axes: Sequence[int]
) -> Tensor:
    """Return ``x`` broadcast to the shape of ``like``, or to some of its sizes."""
    if not axes:
        return x.expand(like.shape)
    return broadcast_axis(x, axes, [like.shape[axis] for axis in like_axes])


def reverse(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return ``x`` with the elements along ``axes`` in reverse order."""
    return torch.flip(x, list(axes))


def rows(indices: Tensor, count: int) -> Tensor:
    """Return the rows of a table that indices of any type name; others name the first or last."""
    return indices.long().clamp(0, count - 1)


def take(x: Tensor, indices: Tensor, axis: int, wrap: bool) -> Tensor:
    """Return entries along ``axis``; indices outside are clipped, or counted around."""
    axis, size = axis % x.dim(), x.shape[axis]
    places = indices.long() % size if wrap else rows(indices, size)
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def pick(x: Tensor, indices: Tensor, axis: int, keepdims: bool, wrap: bool) -> Tensor:
    """Return one element of each line along ``axis``."""
    axis, size = axis % x.dim(), x.shape[axis]
    places = indices if indices.dim() == x.dim() else indices.unsqueeze(axis)
    places = places.long() % size if wrap else rows(places, size)
    found = torch.gather(x, axis, places)
    return found if keepdims else found.squeeze(axis)


def gather_nd(x: Tensor, indices: Tensor) -> Tensor:
    """Return the entries at positions that the first dimension of ``indices`` spells out."""
    return x[tuple(indices.long().unbind(0))]


def one_hot(indices: Tensor, depth: int, on: float, off: float, dtype: torch.dtype) -> Tensor:
    """Return ``on`` at the indices of a new last axis of ``depth``, ``off`` elsewhere."""
    classes = torch.arange(depth, device=indices.device)
    return torch.where(indices.long().unsqueeze(-1) == classes, on, off).to(dtype)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` where ``condition`` is not zero, else ``y``; a vector chooses whole rows."""
    chosen = condition != 0
    if chosen.dim() == 1 and x.dim() > 1:
        chosen = chosen.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(chosen, x, y)


def depth_to_space(x: Tensor, block: int) -> Tensor:
    """Return channels laid out as blocks of pixels; the channels of a block come first."""
    n, c, h, w = x.shape
    y = x.reshape(n, block, block, c // (block * block), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // (block * block), h * block, w * block)


def space_to_depth(x: Tensor, block: int) -> Tensor:
    """Return blocks of pixels laid out as channels; the places in a block come first."""
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * block * block, h // block, w // block)
