"""Arithmetic, reductions, products and norms as MXNet defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
