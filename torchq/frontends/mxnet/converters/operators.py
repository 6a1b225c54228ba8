"""Arithmetic, reductions, norms, shapes, slices and look-ups as MXNet defines them."""

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import FrontendError
from torchq.frontends.building.functions import (
    depth_to_space,
    lookup,
    pad_amounts,
    permuted,
    slice_axis,
    space_to_depth,
)
from torchq.frontends.building.graph import Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.mxnet.node import SymbolContext, converter, row

_COMPARISONS = {
    "equal": "eq",
    "not_equal": "ne",
    "greater": "gt",
    "greater_equal": "ge",
}
_COMPARISONS |= {"lesser": "lt", "lesser_equal": "le"}


@one_call
def compare(kind: str, a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a comparison holds, else 0, in the element type of ``a``."""
    is_true: Tensor = getattr(torch, _COMPARISONS[kind])(a, b)
    return is_true.to(a.dtype)


@one_call
def add_all(*tensors: Tensor) -> Tensor:
    """Return the sum of tensors, added from left to right."""
    return fold(torch.add, tensors)


@one_call
def softmax_rows(x: Tensor) -> Tensor:
    """Return a softmax over all dimensions but the first."""
    return x.flatten(1).softmax(1).view_as(x)


def _vector(x: Tensor) -> Tensor:
    """Return ``x``; MXNet has no tensors without dimensions, but vectors of one element."""
    return x.reshape(1) if x.dim() == 0 else x


@one_call
def reduce(
    x: Tensor, kind: str, axes: Sequence[int], keepdims: bool, exclude: bool
) -> Tensor:
    """Return a reduction along axes, along all without any, or along the others if ``exclude``."""
    chosen = [axis % x.dim() for axis in axes]
    if exclude:
        chosen = [axis for axis in range(x.dim()) if axis not in chosen]
        if not chosen:
            return x
    function = getattr(torch, {"max": "amax", "min": "amin"}.get(kind, kind))
    return _vector(function(x, chosen or list(range(x.dim())), keepdim=keepdims))


@one_call
def norm(x: Tensor, order: int, axes: Sequence[int], keepdims: bool) -> Tensor:
    """Return norms along axes."""
    return _vector(torch.linalg.vector_norm(x, order, list(axes) or None, keepdims))


@one_call
def arg_extreme(x: Tensor, largest: bool, axis: int | None, keepdims: bool) -> Tensor:
    """Return the places of extreme elements as numbers; without an axis all are one line."""
    if axis is None:
        x, axis, keepdims = x.reshape(-1), 0, True
    return (x if largest else -x).argmax(axis, keepdims).to(torch.float32)


@one_call
def dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return products over the last axis of ``a`` and the first of ``b``, unless transposed."""
    axes = ([0 if transpose_a else a.dim() - 1], [b.dim() - 1 if transpose_b else 0])
    return _vector(torch.tensordot(a, b, dims=axes))


@one_call
def batch_dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return the matmul of each pair of matrices."""
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


@one_call
def batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    axis: int,
) -> Tensor:
    """Return a BatchNorm with fixed statistics along any axis."""
    shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
    g, b, m, v = (part.reshape(shape) for part in (gamma, beta, mean, variance))
    return (x - m) / torch.sqrt(v + eps) * g + b


@one_call
def l2_normalize(x: Tensor, mode: str, eps: float) -> Tensor:
    """Return ``x`` over the norm of each sample, of a place's channels, or a channel's places."""
    axes = (
        [1]
        if mode == "channel"
        else list(range(2 if mode == "spatial" else 1, x.dim()))
    )
    return x / torch.sqrt(torch.sum(x * x, axes, keepdim=True) + eps)


_SAME_NAMES = "abs ceil cos erf exp floor log reciprocal rsqrt sign sin sqrt square"
for _name in (*_SAME_NAMES.split(), "ones_like", "zeros_like"):
    row(_name, getattr(torch, _name))
_ARITHMETIC: dict[str, Any] = {
    "negative": torch.neg,
    "elemwise_add _plus _Plus _add broadcast_add broadcast_plus _grad_add": torch.add,
    "elemwise_sub _minus _Minus _sub broadcast_sub broadcast_minus": torch.sub,
    "elemwise_mul _mul _Mul broadcast_mul": torch.mul,
    "elemwise_div _div _Div broadcast_div": torch.div,
    "_maximum _Maximum broadcast_maximum": torch.maximum,
    "_minimum _Minimum broadcast_minimum": torch.minimum,
    "_power _Power broadcast_power": torch.pow,
    "add_n ElementWiseSum": add_all,
}
for _names, _function in _ARITHMETIC.items():
    row(_names, _function)
row("dot", dot, transpose_a=False, transpose_b=False)
row("batch_dot", batch_dot, transpose_a=False, transpose_b=False)


@converter("sum", "sum_axis", "mean", "max", "max_axis", "min", "min_axis")
def _reduce(node: SymbolContext) -> Value:
    kind = node.op_type.partition("_")[0]
    axes = node.attr("axis", [])
    options = node.attr("keepdims", False), node.attr("exclude", False)
    return node.call(reduce, node.inputs[0], kind, axes, *options)


@converter("norm")
def _norm(node: SymbolContext) -> Value:
    node.expect("out_dtype", "float32")
    options = node.attr("ord", 2), node.attr("axis", []), node.attr("keepdims", False)
    return node.call(norm, node.inputs[0], *options)


#: As in _greater_equal, broadcast_greater_equal, _Greater_Equal and _GreaterEqualScalar.
_COMPARED = {
    name: kind
    for kind in _COMPARISONS
    for name in (f"_{kind}", f"broadcast_{kind}", f"_{kind.title()}", f"_{kind}_scalar")
    + (f"_{kind.title().replace('_', '')}Scalar",)
}


@converter(*_COMPARED)
def _compared(node: SymbolContext) -> Value:
    other = node.input(1) if len(node.inputs) > 1 else node.attr("scalar", float)
    return node.call(compare, _COMPARED[node.op_type], node.inputs[0], other)


#: With a number behind the input, after another function of the input.
_SCALAR: dict[str, tuple[Callable[..., object], Callable[..., object] | None]] = {
    "_plus_scalar _PlusScalar": (torch.add, None),
    "_minus_scalar _MinusScalar": (torch.sub, None),
    "_rminus_scalar _RMinusScalar": (torch.add, torch.neg),
    "_mul_scalar _MulScalar": (torch.mul, None),
    "_div_scalar _DivScalar": (torch.div, None),
    "_rdiv_scalar _RDivScalar": (torch.mul, torch.reciprocal),
    "_power_scalar _PowerScalar": (torch.pow, None),
}
_SCALARS = {
    name: functions for names, functions in _SCALAR.items() for name in names.split()
}


@converter(*_SCALARS)
def _with_scalar(node: SymbolContext) -> Value:
    function, before = _SCALARS[node.op_type]
    x = node.inputs[0]
    x = x if before is None else node.call(before, x)
    return node.call(function, x, node.attr("scalar", float))


@converter("_rpower_scalar", "_RPowerScalar")
def _exponential(node: SymbolContext) -> Value:
    return node.call(torch.pow, node.attr("scalar", float), node.inputs[0])


@converter("_maximum_scalar", "_MaximumScalar", "_minimum_scalar", "_MinimumScalar")
def _bound(node: SymbolContext) -> Value:
    limit = node.attr("scalar", float)
    is_lowest = node.op_type.lower().startswith("_max")
    return node.call(
        torch.clamp, node.inputs[0], *((limit, None) if is_lowest else (None, limit))
    )


@converter("clip")
def _clip(node: SymbolContext) -> Value:
    low = node.attr("a_min", float)
    high = node.attr("a_max", float)
    if (low, high) == (0, 6):
        return node.module(nn.ReLU6(), node.inputs[0])
    return node.call(torch.clamp, node.inputs[0], low, high)


@converter("Cast", "cast", "amp_cast")
def _cast(node: SymbolContext) -> Value:
    return node.call(torch.Tensor.to, node.inputs[0], node.attr("dtype", torch.dtype))


@converter("Pad", "pad")
def _pad(node: SymbolContext) -> Value:
    mode = node.attr("mode", str)
    widths = node.attr("pad_width", list)
    value = [node.attr("constant_value", 0.0)] if mode == "constant" else []
    if (
        mode not in ("constant", "edge", "reflect")
        or widths[:4] != [0] * 4
        or len(widths) % 2
    ):
        node.refuse(
            f"mode is {mode!r} and pad_width {widths}; expected pads of images alone"
        )
    amounts = pad_amounts([*widths[4::2], *widths[5::2]])
    mode = {"edge": "replicate"}.get(mode, mode)
    return node.call(F.pad, node.inputs[0], amounts, mode, *value)


@converter("argmax", "argmin")
def _extreme(node: SymbolContext) -> Value:
    options = node.attr("axis", int | None), node.attr("keepdims", False)
    return node.call(arg_extreme, node.inputs[0], node.op_type == "argmax", *options)


_LARGEST = 2**26


@converter("Reshape", "reshape")
def _reshape(node: SymbolContext) -> Value:
    codes = node.attr("shape", list)
    reverse = node.attr("reverse", False)
    node.expect("target_shape", "()", "(0, 0)", "(0,0)")
    if codes == [0, -1] and not reverse:
        return node.call(torch.flatten, node.inputs[0], 1)
    return node.call(reshape, node.inputs[0], codes, reverse)


@converter("squeeze")
def _squeeze(node: SymbolContext) -> Value:
    axes = node.attr("axis", [])
    return node.call(torch.squeeze, node.inputs[0], *([tuple(axes)] if axes else []))


@converter("Concat", "concat", "stack")
def _concat(node: SymbolContext) -> Value:
    if node.op_type == "stack":
        return node.call(torch.stack, list(node.inputs), node.attr("axis", 0))
    return node.call(torch.cat, list(node.inputs), node.attr("dim", 1))


@converter("SliceChannel", "split")
def _split(node: SymbolContext) -> list[Value]:
    axis = node.attr("axis", 1)
    count = node.attr("num_outputs", int)
    return _parts(node, axis, count, count)


@converter("_split_v2")
def _split_at(node: SymbolContext) -> list[Value]:
    sections = node.attr("sections", 0)
    indices = node.attr("indices", [])
    count = sections or len(indices)
    where = sections or indices[1:]  # the first one is 0
    return _parts(node, node.attr("axis", 0), count, where)


def _parts(
    node: SymbolContext, axis: int, count: int, where: int | list[int]
) -> list[Value]:
    if not 0 < count < _LARGEST:
        node.refuse(f"it has {count} outputs; expected a positive number")
    squeezed = node.attr("squeeze_axis", False)
    if isinstance(where, int):
        parts = node.call_parts(
            count, split_evenly, node.inputs[0], count, axis, squeezed
        )
    else:
        parts = node.call_parts(count, torch.tensor_split, node.inputs[0], where, axis)
    return [
        node.call(torch.squeeze, part, axis) if squeezed else part for part in parts
    ]


@converter("slice", "crop")
def _slice(node: SymbolContext) -> Value:
    begin = node.attr("begin", list)
    end = node.attr("end", list)
    stride = node.attr("step", [])
    if len(begin) != len(end):
        node.refuse(f"begin is {begin} and end {end}; expected equally many")
    return node.call(slice_each, node.inputs[0], begin, end, stride)


@converter("slice_axis")
def _slice_axis(node: SymbolContext) -> Value:
    axis = node.attr("axis", int)
    begin = node.attr("begin", int)
    end = node.attr("end", int | None)
    return node.call(slice_axis, node.inputs[0], axis, begin, end, 1)


@converter("take")
def _take(node: SymbolContext) -> Value:
    mode = node.attr("mode", "clip")
    if mode not in ("clip", "wrap"):
        node.refuse(f"mode is {mode!r}; expected clip or wrap")
    return node.call(take, *node.inputs, node.attr("axis", 0), mode == "wrap")


@converter("_zeros", "_ones", "_full")
def _filled(node: SymbolContext) -> Value:
    shape = node.attr("shape", list)
    dtype = node.attr("dtype", torch.float32)
    if not 0 < math.prod(shape) <= _LARGEST:
        node.refuse(f"its shape is {shape}; expected at most {_LARGEST} elements")
    value = {"_zeros": 0.0, "_ones": 1.0}.get(node.op_type)
    value = node.attr("value", float) if value is None else value
    return node.call(torch.full, shape, value, dtype=dtype)


@converter("_arange")
def _arange(node: SymbolContext) -> Value:
    start = node.attr("start", 0.0)
    stop = node.attr("stop", float | None)
    each = node.attr("step", 1.0)
    repeat = node.attr("repeat", 1)
    node.expect("infer_range", "False", "0")
    first, last = (0.0, start) if stop is None else (start, stop)
    if not each or not 0 <= (last - first) / each * repeat <= _LARGEST:
        node.refuse(
            f"got a range from {first} to {last}; expected at most {_LARGEST} elements"
        )
    dtype = node.attr("dtype", torch.float32)
    sequence = node.call(torch.arange, first, last, each, dtype=dtype)
    return (
        sequence
        if repeat == 1
        else node.call(torch.repeat_interleave, sequence, repeat)
    )


@one_call
def reshape(x: Tensor, codes: Sequence[int], reverse: bool) -> Tensor:
    """Return ``x`` in the shape that codes describe, matched from the right if ``reverse``.

    A positive code is a size; 0 keeps a size, -1 is the rest, -2 keeps all remaining sizes, -3
    merges two, -4 splits one into the two sizes that follow, one of which may be -1.
    """
    step = -1 if reverse else 1
    remaining_sizes = list(x.shape)[::step]
    remaining_codes = list(codes)[::step]
    result: list[int] = []
    while remaining_codes:
        code = remaining_codes.pop(0)
        if code == -2:
            result, remaining_sizes = result + remaining_sizes, []
        elif code == -3:
            result.append(remaining_sizes.pop(0) * remaining_sizes.pop(0))
        elif code == -4:
            size = remaining_sizes.pop(0)
            left = remaining_codes.pop(0)
            right = remaining_codes.pop(0)
            left = size // right if left == -1 else left
            result += [left, size // left if right == -1 else right]
        else:
            next_size = remaining_sizes.pop(0) if remaining_sizes else 0
            result.append(next_size if code == 0 else code)
    return x.reshape(result[::step])


@one_call
def split_evenly(
    x: Tensor, count: int, axis: int, one_each: bool
) -> tuple[Tensor, ...]:
    """Return ``count`` equal parts along ``axis``, of one entry where there must be ``one_each``.

    MXNet refuses other sizes, which torch would split into parts of different sizes.
    """
    size = x.shape[axis]
    # A trace may have a symbol for the size.
    if isinstance(size, int) and (size % count or (one_each and size != count)):
        multiple = count if one_each else f"a multiple of {count}"
        raise FrontendError(
            f"from_mxnet: SliceChannel: got {size} entries along axis {axis} to split into {count} "
            f"parts; expected {multiple}. Give the model inputs of the size that it was made for"
        )
    return x.tensor_split(count, axis)


@one_call
def slice_each(
    x: Tensor,
    begin: Sequence[int | None],
    end: Sequence[int | None],
    stride: Sequence[int | None],
) -> Tensor:
    """Return a slice of the first dimensions; a negative stride runs backwards."""
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        every = (stride[axis] if axis < len(stride) else None) or 1
        x = slice_axis(x, axis, first, last, every)
    return x


@one_call
def slice_like(x: Tensor, like: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the first part of ``x``, of the size of ``like`` along ``axes``, by default all."""
    for axis in [axis % x.dim() for axis in axes] or range(x.dim()):
        x = x.narrow(axis, 0, like.shape[axis])
    return x


@one_call
def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` broadcast to ``shape``, where 0 keeps a size."""
    return x.expand(
        [
            old_size if size == 0 else size
            for old_size, size in zip(x.shape, shape, strict=True)
        ]
    )


@one_call
def rows(indices: Tensor, count: int) -> Tensor:
    """Return the rows of a table that indices of any type name; others name the first or last."""
    return indices.long().clamp(0, count - 1)


@one_call
def take(x: Tensor, indices: Tensor, axis: int, wrap: bool) -> Tensor:
    """Return entries along ``axis``; indices outside are clipped, or counted around."""
    axis, size = axis % x.dim(), x.shape[axis]
    return lookup(x, indices.long() % size if wrap else rows(indices, size), axis)


@one_call
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` where ``condition`` is not zero, else ``y``; a vector chooses whole rows."""
    chosen = condition != 0
    if chosen.dim() == 1 and x.dim() > 1:
        chosen = chosen.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(chosen, x, y)


row("transpose", permuted, axes=[])
row("SwapAxis swapaxes", torch.transpose, dim1=0, dim2=0)
row("expand_dims", torch.unsqueeze, axis=int)
row("slice_like", slice_like, axes=[])
row("tile", torch.tile, reps=list)
row("repeat", torch.repeat_interleave, repeats=int, axis=int | None)
row("reverse flip", torch.flip, axis=list)
row("broadcast_to", broadcast_to, shape=list)
row("broadcast_like", torch.Tensor.expand_as)
row("where", where)
row("depth_to_space", depth_to_space, block_size=int)
row("space_to_depth", space_to_depth, block_size=int)
