"""Elementwise arithmetic: the identity list, and the operators with a number as attribute."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import elementwise
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter, identity

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
    "rint": elementwise.rint,
    "round": elementwise.round_half_away,
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
    elementwise.modulo: "_mod _Mod broadcast_mod",
    elementwise.add_all: "add_n ElementWiseSum",
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
    _compared(_kind, elementwise.compare, *_names.split())
for _kind in ("and", "or", "xor"):
    _names = f"broadcast_logical_{_kind} _logical_{_kind} _logical_{_kind}_scalar"
    _compared(_kind, elementwise.logical, *_names.split())

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
    "mod": (elementwise.modulo, False),
    "rmod": (elementwise.modulo, True),
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
    return node.call(elementwise.compare, "equal", node.inputs[0], 0.0)


@converter("smooth_l1")
def _smooth_l1(node: SymbolContext) -> Value:
    return node.call(elementwise.smooth_l1, node.inputs[0], node.number("scalar", 1.0))


@converter("Cast", "cast", "amp_cast")
def _cast(node: SymbolContext) -> Value:
    node.text("dtype")
    return node.call(torch.Tensor.to, node.inputs[0], node.dtype("dtype"))


@converter("dot")
def _dot(node: SymbolContext) -> Value:
    options = node.flag("transpose_a", False), node.flag("transpose_b", False)
    return node.call(elementwise.dot, *node.inputs, *options)


@converter("batch_dot")
def _batch_dot(node: SymbolContext) -> Value:
    options = node.flag("transpose_a", False), node.flag("transpose_b", False)
    return node.call(elementwise.batch_dot, *node.inputs, *options)


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
