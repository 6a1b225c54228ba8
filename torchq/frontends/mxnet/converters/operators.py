"""Arithmetic, reductions, norms, shapes, slices and look-ups as MXNet defines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import (
    depth_to_space,
    permuted,
    slice_axis,
    space_to_depth,
)
from torchq.frontends.building.graph import Value
from torchq.frontends.mxnet.node import SymbolContext, converter, operator

_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "lesser": torch.lt,
    "lesser_equal": torch.le,
}
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def compare(kind: str, a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a comparison holds, else 0, in the element type of ``a``."""
    return _COMPARISONS[kind](a, b).to(a.dtype)


def add_all(*tensors: Tensor) -> Tensor:
    """Return the sum of tensors, added from left to right."""
    return fold(torch.add, tensors)


def softmax_rows(x: Tensor) -> Tensor:
    """Return a softmax over all dimensions but the first."""
    return x.flatten(1).softmax(1).view_as(x)


def _vector(x: Tensor) -> Tensor:
    """Return ``x``; MXNet has no tensors without dimensions, but vectors of one element."""
    return x.reshape(1) if x.dim() == 0 else x


def reduce(x: Tensor, kind: str, axes: Sequence[int], keepdims: bool, exclude: bool) -> Tensor:
    """Return a reduction along axes, along all without any, or along the others if ``exclude``."""
    chosen = [axis % x.dim() for axis in axes]
    if exclude:
        chosen = [axis for axis in range(x.dim()) if axis not in chosen]
        if not chosen:
            return x
    return _vector(_REDUCTIONS[kind](x, chosen or list(range(x.dim())), keepdim=keepdims))


def norm(x: Tensor, order: int, axes: Sequence[int], keepdims: bool) -> Tensor:
    """Return norms along axes."""
    return _vector(torch.linalg.vector_norm(x, order, list(axes) or None, keepdims))


def arg_extreme(x: Tensor, largest: bool, axis: int | None, keepdims: bool) -> Tensor:
    """Return the places of extreme elements as numbers; without an axis all are one line."""
    if axis is None:
        x, axis, keepdims = x.reshape(-1), 0, True
    return (x if largest else -x).argmax(axis, keepdims).to(torch.float32)


def dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return products summed over the last axis of ``a`` and the first of ``b``.

    The transposed operands are summed over the first axis and the last one.
    """
    axes = ([0 if transpose_a else a.dim() - 1], [b.dim() - 1 if transpose_b else 0])
    return _vector(torch.tensordot(a, b, dims=axes))


def batch_dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return the matmul of each pair of matrices."""
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


def batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor, eps: float, axis: int
) -> Tensor:
    """Return a BatchNorm with fixed statistics along any axis."""
    shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
    g, b, m, v = (part.reshape(shape) for part in (gamma, beta, mean, variance))
    return (x - m) / torch.sqrt(v + eps) * g + b


def l2_normalize(x: Tensor, mode: str, eps: float) -> Tensor:
    """Return ``x`` divided by a root of sums of squares.

    Over a sample (``"instance"``), the channels of a place (``"channel"``), or the places of a
    channel (``"spatial"``).
    """
    first = {"instance": 1, "channel": 1, "spatial": 2}[mode]
    axes = [1] if mode == "channel" else list(range(first, x.dim()))
    return x / torch.sqrt(torch.sum(x * x, axes, keepdim=True) + eps)


_SAME_NAMES = """abs ceil cos erf exp floor log ones_like reciprocal rsqrt sign sin sqrt square
    zeros_like"""
for _name in _SAME_NAMES.split():
    operator(_name, getattr(torch, _name))
operator("negative", torch.neg)
operator("elemwise_add _plus _Plus _add broadcast_add broadcast_plus _grad_add", torch.add)
operator("elemwise_sub _minus _Minus _sub broadcast_sub broadcast_minus", torch.sub)
operator("elemwise_mul _mul _Mul broadcast_mul", torch.mul)
operator("elemwise_div _div _Div broadcast_div", torch.div)
operator("_maximum _Maximum broadcast_maximum", torch.maximum)
operator("_minimum _Minimum broadcast_minimum", torch.minimum)
operator("_power _Power broadcast_power", torch.pow)
operator("add_n ElementWiseSum", add_all)
_TRANSPOSED = (("flag", "transpose_a", False), ("flag", "transpose_b", False))
operator("dot", dot, *_TRANSPOSED)
operator("batch_dot", batch_dot, *_TRANSPOSED)


def _compared(kind: str) -> None:
    old = kind.title()  # as in _Greater_Equal and _GreaterEqualScalar
    scalars = f"_{kind}_scalar", f"_{old.replace('_', '')}Scalar"

    @converter(f"_{kind}", f"broadcast_{kind}", f"_{old}", *scalars)
    def convert(node: SymbolContext) -> Value:
        other = node.input(1) if len(node.inputs) > 1 else node.number("scalar")
        return node.call(compare, kind, node.inputs[0], other)


for _kind in _COMPARISONS:
    _compared(_kind)


def _scalar(
    kind: str, function: Callable[..., object], before: Callable[..., object] | None = None
) -> None:
    """Enter an operator with a number behind its input, after another function of the input."""
    old = f"R{kind[1:].title()}" if kind[0] == "r" else kind.title()

    @converter(f"_{kind}_scalar", f"_{old}Scalar")
    def convert(node: SymbolContext) -> Value:
        node.attr("is_int")
        x = node.inputs[0] if before is None else node.call(before, node.inputs[0])
        return node.call(function, x, node.number("scalar"))


_scalar("plus", torch.add)
_scalar("minus", torch.sub)
_scalar("rminus", torch.add, torch.neg)
_scalar("mul", torch.mul)
_scalar("div", torch.div)
_scalar("rdiv", torch.mul, torch.reciprocal)
_scalar("power", torch.pow)


@converter("_rpower_scalar", "_RPowerScalar")
def _exponential(node: SymbolContext) -> Value:
    node.attr("is_int")
    return node.call(torch.pow, node.number("scalar"), node.inputs[0])


@converter("_maximum_scalar", "_MaximumScalar", "_minimum_scalar", "_MinimumScalar")
def _bound(node: SymbolContext) -> Value:
    node.attr("is_int")
    limit, is_lowest = node.number("scalar"), node.op_type.lower().startswith("_max")
    return node.call(torch.clamp, node.inputs[0], *((limit, None) if is_lowest else (None, limit)))


@converter("clip")
def _clip(node: SymbolContext) -> Value:
    low, high = node.number("a_min"), node.number("a_max")
    if (low, high) == (0, 6):
        return node.module(nn.ReLU6(), node.inputs[0])
    return node.call(torch.clamp, node.inputs[0], low, high)


@converter("Cast", "cast", "amp_cast")
def _cast(node: SymbolContext) -> Value:
    node.text("dtype")
    return node.call(torch.Tensor.to, node.inputs[0], node.dtype("dtype"))


@converter("Pad", "pad")
def _pad(node: SymbolContext) -> Value:
    mode, widths = node.text("mode"), node.ints("pad_width")
    value = node.number("constant_value", 0.0)
    if mode not in ("constant", "edge", "reflect") or widths[:4] != [0] * 4 or len(widths) % 2:
        node.refuse(f"mode is {mode!r} and pad_width {widths}; expected pads of images alone")
    pairs = list(zip(widths[4::2], widths[5::2], strict=True))
    amounts = [side for pair in reversed(pairs) for side in pair]
    if mode == "constant":
        return node.call(F.pad, node.inputs[0], amounts, "constant", value)
    return node.call(F.pad, node.inputs[0], amounts, {"edge": "replicate"}.get(mode, mode))


@converter("sum", "sum_axis", "mean", "max", "max_axis", "min", "min_axis")
def _reduce(node: SymbolContext) -> Value:
    kind, axes = node.op_type.partition("_")[0], node.ints("axis", [])
    options = node.flag("keepdims", False), node.flag("exclude", False)
    return node.call(reduce, node.inputs[0], kind, axes, *options)


@converter("norm")
def _norm(node: SymbolContext) -> Value:
    order, keepdims = node.integer("ord", 2), node.flag("keepdims", False)
    node.expect("out_dtype", "float32")
    return node.call(norm, node.inputs[0], order, node.ints("axis", []), keepdims)


@converter("argmax", "argmin")
def _extreme(node: SymbolContext) -> Value:
    options = node.op_type == "argmax", node.axis(), node.flag("keepdims", False)
    return node.call(arg_extreme, node.inputs[0], *options)


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
