"""Arithmetic, reductions, products and norms as MXNet defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Value
from torchq.frontends.mxnet.node import SymbolContext, converter, identity

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
_LOGICAL: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
}


def compare(kind: str, a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a comparison holds, else 0, in the element type of ``a``."""
    return _COMPARISONS[kind](a, b).to(a.dtype)


def logical(kind: str, a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a logical operation on "is not zero" holds, else 0."""
    other = b if isinstance(b, Tensor) else torch.tensor(b, device=a.device)
    return _LOGICAL[kind](a, other).to(a.dtype)


def modulo(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return the remainder with the sign of the divisor, 0 where the divisor is 0."""
    left, right = torch.as_tensor(a), torch.as_tensor(b)
    found = torch.remainder(left, right)
    return torch.where(right == 0, torch.zeros_like(found), found)


def add_all(*tensors: Tensor) -> Tensor:
    """Return the sum of tensors, added from left to right."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def rint(x: Tensor) -> Tensor:
    """Round to whole numbers, and halves down."""
    low = x.floor()
    return torch.where(x - low <= 0.5, low, low + 1)


def round_half_away(x: Tensor) -> Tensor:
    """Round to whole numbers, and halves away from zero."""
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Return ``alpha * x + beta``, at least 0 and at most 1."""
    return (alpha * x + beta).clamp(0, 1)


def elu(x: Tensor, slope: float) -> Tensor:
    """Return ``x``, or ``slope * (exp(x) - 1)`` where it is negative."""
    return F.elu(x, slope)


def smooth_l1(x: Tensor, scalar: float) -> Tensor:
    """Return ``(scalar * x)**2 / 2`` near zero and ``|x| - 1 / (2 * scalar**2)`` elsewhere."""
    square = scalar * scalar
    return torch.where(x.abs() < 1 / square, 0.5 * square * x * x, x.abs() - 0.5 / square)


def softmax_rows(x: Tensor) -> Tensor:
    """Return a softmax over all dimensions but the first."""
    return x.flatten(1).softmax(1).view_as(x)


def _axes(x: Tensor, axes: Sequence[int], exclude: bool) -> list[int]:
    """Return the axes of a reduction: all where none are given, the others if ``exclude``."""
    chosen = [axis % x.dim() for axis in axes]
    if exclude:
        return [axis for axis in range(x.dim()) if axis not in chosen]
    return chosen or list(range(x.dim()))


def reduce(x: Tensor, kind: str, axes: Sequence[int], keepdims: bool, exclude: bool) -> Tensor:
    """Return sums, means, products, maxima or minima along axes."""
    places = _axes(x, axes, exclude)
    if not places:
        return x
    if kind.startswith("nan"):
        x, kind = torch.where(x.isnan(), float(kind == "nanprod"), x), kind[3:]
    if kind == "prod":
        for axis in sorted(places, reverse=True):
            x = x.prod(axis, keepdim=True)
        result = x if keepdims else x.squeeze(places)
    else:
        result = _REDUCTIONS[kind](x, places, keepdim=keepdims)
    # MXNet has no tensors without dimensions: all that is reduced leaves a vector of one element.
    return result.reshape(1) if result.dim() == 0 else result


def norm(x: Tensor, order: int, axes: Sequence[int], keepdims: bool) -> Tensor:
    """Return norms along axes."""
    found = torch.linalg.vector_norm(x, order, _axes(x, axes, False), keepdims)
    return found.reshape(1) if found.dim() == 0 else found


def top(x: Tensor, kind: str, axis: int | None, count: int, ascending: bool) -> Tensor:
    """Return the places of extreme elements as numbers, or sorted values.

    ``kind`` is argmax, argmin, sort, argsort, indices, value, or mask (1 at the places); ``count``
    of 0 takes all, an axis of None all elements as one line.
    """
    if axis is None:
        x, axis = x.reshape(-1), 0
    if kind in ("argmax", "argmin"):
        values = x if kind == "argmax" else -x
        return values.argmax(axis).to(torch.float32)
    values, places = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    if kind in ("sort", "argsort"):
        return values if kind == "sort" else places.to(torch.float32)
    size = count or x.shape[axis]
    values, places = values.narrow(axis, 0, size), places.narrow(axis, 0, size)
    if kind == "mask":
        return torch.zeros_like(x).scatter(axis, places, 1.0)
    return values if kind == "value" else places.to(torch.float32)


def dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return products summed over the last axis of ``a`` and the first of ``b``.

    The transposed operands are summed over the first axis and the last one.
    """
    axes = ([0 if transpose_a else a.dim() - 1], [b.dim() - 1 if transpose_b else 0])
    found = torch.tensordot(a, b, dims=axes)
    return found.reshape(1) if found.dim() == 0 else found


def batch_dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return the matmul of each pair of matrices."""
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


def _along(parameter: Tensor, ndim: int, axis: int) -> Tensor:
    return parameter.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])


def batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor, eps: float, axis: int
) -> Tensor:
    """Return a BatchNorm with fixed statistics along any axis."""
    g, b, m, v = (_along(part, x.dim(), axis) for part in (gamma, beta, mean, variance))
    return (x - m) / torch.sqrt(v + eps) * g + b


def instance_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Return each channel of each sample normalized, then scaled and shifted."""
    return F.instance_norm(x, weight=gamma, bias=beta, eps=eps)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float, axis: int) -> Tensor:
    """Return lines along one axis normalized, then scaled and shifted."""
    moved = F.layer_norm(x.movedim(axis, -1), gamma.shape, gamma, beta, eps)
    return moved.movedim(-1, axis)


def group_norm(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> Tensor:
    """Return groups of channels normalized; scales belong to groups, or to channels."""
    each = x.shape[1] // gamma.numel()
    return F.group_norm(x, groups, gamma.repeat_interleave(each), beta.repeat_interleave(each), eps)


def l2_normalize(x: Tensor, mode: str, eps: float) -> Tensor:
    """Return ``x`` divided by a root of sums of squares.

    Over a sample (``"instance"``), the channels of a place (``"channel"``), or the places of a
    channel (``"spatial"``).
    """
    first = {"instance": 1, "channel": 1, "spatial": 2}[mode]
    axes = [1] if mode == "channel" else list(range(first, x.dim()))
    return x / torch.sqrt(torch.sum(x * x, axes, keepdim=True) + eps)


_UNARY: dict[str, Callable[..., object]] = {
    "abs": torch.abs,
    "arccos": torch.acos,
    "arccosh": torch.acosh,
    "arcsin": torch.asin,
    "arcsinh": torch.asinh,
    "arctan": torch.atan,
    "arctanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "degrees": torch.rad2deg,
    "erf": torch.erf,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "fix": torch.trunc,
    "floor": torch.floor,
    "gammaln": torch.lgamma,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "negative": torch.neg,
    "ones_like": torch.ones_like,
    "radians": torch.deg2rad,
    "reciprocal": torch.reciprocal,
    "rint": rint,
    "round": round_half_away,
    "rsqrt": torch.rsqrt,
    "sign": torch.sign,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": torch.tan,
    "trunc": torch.trunc,
    "zeros_like": torch.zeros_like,
}
for _name, _function in _UNARY.items():
    identity(_function, _name)

#: From a function to the names of operators that apply it to two tensors.
_BINARY: dict[Callable[..., object], str] = {
    torch.add: "elemwise_add _plus _Plus _add broadcast_add broadcast_plus _grad_add",
    torch.sub: "elemwise_sub _minus _Minus _sub broadcast_sub broadcast_minus",
    torch.mul: "elemwise_mul _mul _Mul broadcast_mul",
    torch.div: "elemwise_div _div _Div broadcast_div",
    torch.maximum: "_maximum _Maximum broadcast_maximum",
    torch.minimum: "_minimum _Minimum broadcast_minimum",
    torch.pow: "_power _Power broadcast_power",
    torch.hypot: "_hypot _Hypot broadcast_hypot",
    modulo: "_mod _Mod broadcast_mod",
    add_all: "add_n ElementWiseSum",
}
for _function, _names in _BINARY.items():
    identity(_function, *_names.split())


def _compared(kind: str, function: Callable[..., object], *op_types: str) -> None:
    @converter(*op_types)
    def convert(node: SymbolContext) -> Value:
        other = node.input(1) if len(node.inputs) > 1 else node.number("scalar")
        return node.call(function, kind, node.inputs[0], other)


for _kind in ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal"):
    _old = _kind.title()  # as in _Greater_Equal and _GreaterEqualScalar
    _names = f"_{_kind} broadcast_{_kind} _{_kind}_scalar _{_old} _{_old.replace('_', '')}Scalar"
    _compared(_kind, compare, *_names.split())
for _kind in ("and", "or", "xor"):
    _names = f"broadcast_logical_{_kind} _logical_{_kind} _logical_{_kind}_scalar"
    _compared(_kind, logical, *_names.split())

#: From the name of an operator to its function and whether the number comes first.
_SCALAR: dict[str, tuple[Callable[..., object], bool]] = {
    "plus": (torch.add, False),
    "minus": (torch.sub, False),
    "rminus": (torch.sub, True),
    "mul": (torch.mul, False),
    "div": (torch.div, False),
    "rdiv": (torch.div, True),
    "power": (torch.pow, False),
    "rpower": (torch.pow, True),
    "mod": (modulo, False),
    "rmod": (modulo, True),
}
_OLD_NAMES = {"rminus": "RMinus", "rdiv": "RDiv", "rpower": "RPower", "rmod": "RMod"}


def _scalar(kind: str, function: Callable[..., object], reverse: bool) -> None:
    @converter(f"_{kind}_scalar", f"_{_OLD_NAMES.get(kind, kind.title())}Scalar")
    def convert(node: SymbolContext) -> Value:
        node.attr("is_int")
        number, x = node.number("scalar"), node.inputs[0]
        if not reverse:
            return node.call(function, x, number)
        if function is torch.sub:
            return node.call(torch.add, node.call(torch.neg, x), number)
        if function is torch.div:
            return node.call(torch.mul, node.call(torch.reciprocal, x), number)
        return node.call(function, number, x)


for _kind, (_function, _reverse) in _SCALAR.items():
    _scalar(_kind, _function, _reverse)


@converter("_maximum_scalar", "_MaximumScalar")
def _maximum(node: SymbolContext) -> Value:
    node.attr("is_int")
    return node.call(torch.clamp, node.inputs[0], node.number("scalar"))


@converter("_minimum_scalar", "_MinimumScalar")
def _minimum(node: SymbolContext) -> Value:
    node.attr("is_int")
    return node.call(torch.clamp, node.inputs[0], None, node.number("scalar"))


@converter("clip")
def _clip(node: SymbolContext) -> Value:
    low, high = node.number("a_min"), node.number("a_max")
    if (low, high) == (0, 6):
        return node.module(nn.ReLU6(), node.inputs[0])
    return node.call(torch.clamp, node.inputs[0], low, high)


@converter("cbrt", "rcbrt")
def _cube_root(node: SymbolContext) -> Value:
    size = node.call(torch.pow, node.call(torch.abs, node.inputs[0]), 1 / 3)
    root = node.call(torch.mul, node.call(torch.sign, node.inputs[0]), size)
    return root if node.op_type == "cbrt" else node.call(torch.reciprocal, root)


@converter("logical_not")
def _not(node: SymbolContext) -> Value:
    return node.call(compare, "equal", node.inputs[0], 0.0)


@converter("smooth_l1")
def _smooth_l1(node: SymbolContext) -> Value:
    return node.call(smooth_l1, node.inputs[0], node.number("scalar", 1.0))


@converter("Cast", "cast", "amp_cast")
def _cast(node: SymbolContext) -> Value:
    node.text("dtype")
    return node.call(torch.Tensor.to, node.inputs[0], node.dtype("dtype"))


@converter("dot")
def _dot(node: SymbolContext) -> Value:
    options = node.flag("transpose_a", False), node.flag("transpose_b", False)
    return node.call(dot, *node.inputs, *options)


@converter("batch_dot")
def _batch_dot(node: SymbolContext) -> Value:
    options = node.flag("transpose_a", False), node.flag("transpose_b", False)
    return node.call(batch_dot, *node.inputs, *options)


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


@converter("sum", "sum_axis", "mean", "prod", "max", "max_axis", "min", "min_axis")
@converter("nansum", "nanprod")
def _reduce(node: SymbolContext) -> Value:
    kind = node.op_type.partition("_")[0]
    axes = node.ints("axis", [])
    options = node.flag("keepdims", False), node.flag("exclude", False)
    return node.call(reduce, node.inputs[0], kind, axes, *options)


@converter("norm")
def _norm(node: SymbolContext) -> Value:
    order, keepdims = node.integer("ord", 2), node.flag("keepdims", False)
    node.expect("out_dtype", "float32")
    return node.call(norm, node.inputs[0], order, node.ints("axis", []), keepdims)


def _axis(node: SymbolContext, default: int | None) -> int | None:
    """Return the attribute ``axis``, None for all elements as one line."""
    if "axis" not in node.attributes:
        return default
    return None if node.attr("axis") is None else node.integer("axis")


@converter("argmax", "argmin")
def _extreme(node: SymbolContext) -> Value:
    axis, keepdims = _axis(node, None), node.flag("keepdims", False)
    found = node.call(top, node.inputs[0], node.op_type, axis, 1, False)
    if axis is None:
        return node.call(torch.reshape, found, [1])
    return node.call(torch.unsqueeze, found, axis) if keepdims else found


@converter("argmax_channel")
def _argmax_channel(node: SymbolContext) -> Value:
    return node.call(top, node.inputs[0], "argmax", 1, 1, False)


@converter("sort", "argsort")
def _sort(node: SymbolContext) -> Value:
    ascending = node.flag("is_ascend", True)
    node.expect("dtype", "float32")
    axis = (
        None
        if "axis" in node.attributes and node.attr("axis") is None
        else node.integer("axis", -1)
    )
    return node.call(top, node.inputs[0], node.op_type, axis, 0, ascending)


@converter("topk")
def _topk(node: SymbolContext) -> Value | list[Value]:
    count, ascending = node.integer("k", 1), node.flag("is_ascend", False)
    node.expect("dtype", "float32")
    axis = (
        None
        if "axis" in node.attributes and node.attr("axis") is None
        else node.integer("axis", -1)
    )
    kind = node.text("ret_typ", "indices")
    if kind not in ("indices", "value", "mask", "both"):
        node.refuse(f"ret_typ is {kind!r}; expected indices, value, mask or both")
    kinds = ["value", "indices"] if kind == "both" else [kind]
    return [node.call(top, node.inputs[0], each, axis, count, ascending) for each in kinds]
