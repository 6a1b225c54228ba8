"""Elementwise arithmetic, comparisons, logic, changes of type, and activations."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.frontends.building.functions import hard_sigmoid
from torchq.frontends.building.graph import Constant, Ints, Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import (
    NUMBERS,
    UNSIGNED,
    NodeContext,
    converter,
    row,
)
from torchq.frontends.onnx.converters.bits import unsigned
from torchq.frontends.onnx.reader import dtype_of

#: From an operator to the functions for tensors and for numbers.
_NUMERIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Add": (torch.add, operator.add),
    "Sub": (torch.sub, operator.sub),
    "Mul": (torch.mul, operator.mul),
    # Sizes are not negative, so that rounding down is rounding toward zero.
    "Div": (torch.div, operator.floordiv),
    "Equal": (torch.eq, operator.eq),
    "Greater": (torch.gt, operator.gt),
    "GreaterOrEqual": (torch.ge, operator.ge),
    "Less": (torch.lt, operator.lt),
    "LessOrEqual": (torch.le, operator.le),
}


def scalar_or_value(node: NodeContext, index: int) -> Any:
    """Return an input; a constant scalar as a number, which keeps the type of what it meets."""
    value = node.inputs[index]
    if isinstance(value, Constant) and value.tensor.dim() == 0:
        return value.tensor.item()
    return value


def _on_sizes(
    node: NodeContext, function: Callable[..., object], dtype: torch.dtype | None = None
) -> Value:
    """Compute on sizes, element by element; None where an input is another tensor."""
    columns: list[Any] = []
    for value in node.inputs:
        if isinstance(value, Ints) and not value.dtype.is_floating_point:
            columns.append(list(value.items))
        elif isinstance(value, Constant) and not value.tensor.is_floating_point():
            columns.append(
                value.tensor.reshape(-1).tolist() if value.tensor.dim() < 2 else []
            )
    counts = {len(column) for column in columns}
    is_known = (
        len(columns) == len(node.inputs) and 0 not in counts and len(counts - {1}) < 2
    )
    if not is_known or not any(isinstance(value, Ints) for value in node.inputs):
        return None
    rows = zip(
        *(column * (max(counts) // len(column)) for column in columns), strict=True
    )
    scalar = all(node.shape(index) == [] for index in range(len(columns)))
    return node.sizes([node.arithmetic(function, *row) for row in rows], scalar, dtype)


@converter(*_NUMERIC, dtypes=NUMBERS | UNSIGNED)
def _numeric(node: NodeContext) -> Value:
    if node.dtype(0) in UNSIGNED:
        return node.call(unsigned, node.op_type, *node.inputs)
    on_tensors, on_numbers = _NUMERIC[node.op_type]
    dtype = None if node.op_type in ("Add", "Sub", "Mul", "Div") else torch.bool
    sizes = _on_sizes(node, on_numbers, dtype)
    if sizes is not None:
        return sizes
    first_value, second_value = node.inputs
    if node.op_type == "Div" and not node.floating(0):
        return node.call(divide, *node.inputs)
    if isinstance(first_value, fx.Node):
        second_value = scalar_or_value(node, 1)
    elif isinstance(second_value, fx.Node) and node.op_type in ("Add", "Mul"):
        first_value, second_value = second_value, scalar_or_value(node, 0)
    bias = _as_bias(node) if node.op_type == "Add" else None
    return node.call(on_tensors, first_value, second_value) if bias is None else bias


def _as_bias(node: NodeContext) -> Value:
    """Give a constant to the linear layer that it is added to; None if there is none."""
    for layer, other in (node.inputs, node.inputs[::-1]):
        if isinstance(layer, fx.Node) and isinstance(other, Constant):
            return node.builder.add_bias(layer, other)
    return None


@converter("Mod", dtypes=NUMBERS | UNSIGNED)
def _mod(node: NodeContext) -> Value:
    fmod = node.attr("fmod", 0)
    if node.dtype(0) in UNSIGNED:
        return node.call(unsigned, node.op_type, *node.inputs)
    return node.call(remainder, *node.inputs, fmod)


@converter("Pow", dtypes=NUMBERS | UNSIGNED)
def _pow(node: NodeContext) -> Value:
    exponent = scalar_or_value(node, 1)
    if node.floating(0) and isinstance(exponent, (int, float)):
        return node.call(torch.pow, node.inputs[0], exponent)
    return node.call(power, *node.inputs)


@one_call
def larger_size(first: Any, second: Any) -> Any:
    """Return the larger one of two sizes: numbers, symbols, or tensors in a TorchScript trace."""
    if isinstance(first, Tensor):
        return torch.clamp_min(first, second)
    if isinstance(second, Tensor):
        return torch.clamp_min(second, first)
    return torch.sym_max(first, second)


@one_call
def smaller_size(first: Any, second: Any) -> Any:
    """Return the smaller one of two sizes; see :func:`larger_size`."""
    if isinstance(first, Tensor):
        return torch.clamp_max(first, second)
    if isinstance(second, Tensor):
        return torch.clamp_max(second, first)
    return torch.sym_min(first, second)


#: From an operator to the functions of two tensors and of two sizes; None where sizes have none.
_VARIADIC: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "Max": (torch.maximum, larger_size),
    "Min": (torch.minimum, smaller_size),
    "Sum": (torch.add, operator.add),
    "Mean": (torch.add, None),
}


@converter(*_VARIADIC, dtypes=NUMBERS | UNSIGNED)
def _variadic(node: NodeContext) -> Value:
    on_tensors, on_sizes = _VARIADIC[node.op_type]
    if node.dtype(0) in UNSIGNED:
        first, *others = node.inputs
        return reduce(
            lambda a, b: node.call(unsigned, node.op_type, a, b), others, first
        )
    if on_sizes is not None and len(node.inputs) == 2:
        sizes = _on_sizes(node, on_sizes)
        if sizes is not None:
            return sizes
    first, *others = node.inputs
    total = reduce(lambda a, b: node.call(on_tensors, a, b), others, first)
    is_mean = node.op_type == "Mean" and others
    return node.call(torch.div, total, len(node.inputs)) if is_mean else total


@converter("IsInf")
def _is_inf(node: NodeContext) -> Value:
    positive, negative = (
        node.attr("detect_positive", 1),
        node.attr("detect_negative", 1),
    )
    functions = {(1, 1): torch.isinf, (1, 0): torch.isposinf, (0, 1): torch.isneginf}
    function = functions.get((bool(positive), bool(negative)))
    if function is None:
        node.refuse("it looks for no infinity; expected one sign at least")
    return node.call(function, node.inputs[0])


@converter("Neg")
def _neg(node: NodeContext) -> Value:
    sizes = _on_sizes(node, operator.neg)
    return node.call(torch.neg, *node.inputs) if sizes is None else sizes


@converter("Not")
def _not(node: NodeContext) -> Value:
    sizes = _on_sizes(node, operator.not_, torch.bool)
    return node.call(torch.logical_not, *node.inputs) if sizes is None else sizes


@converter("Where")
def _where(node: NodeContext) -> Value:
    sizes = _on_sizes(node, choose, node.dtype(1))
    return node.call(torch.where, *node.inputs) if sizes is None else sizes


#: The element types in which sizes are whole numbers; float64 holds all of them, float32 those of
#: dimensions.
_OF_SIZES = (torch.int64, torch.int32, torch.float32, torch.float64)


@converter("Cast", "CastLike", dtypes=None)
def _cast(node: NodeContext) -> Value:
    value = node.inputs[0]
    source = node.dtype(0)
    dtype = dtype_of(node.attr("to", int)) if node.op_type == "Cast" else node.dtype(1)
    unknown = source is None and node.builder.dtypes.get(node.input_names[0], 0) is None
    if dtype not in NUMBERS or unknown:
        node.refuse("torch computes nothing with its elements")
    if isinstance(value, Ints) and value.dtype is not torch.bool:
        if dtype in _OF_SIZES:
            return node.sizes(value.items, value.scalar, dtype)
        if dtype is torch.bool:
            flags = [node.arithmetic(operator.ne, item, 0) for item in value.items]
            return node.sizes(flags, value.scalar, dtype)
    return value if source is dtype else node.call(torch.Tensor.to, value, dtype)


@converter("BitCast", dtypes=NUMBERS | UNSIGNED)
def _bit_cast(node: NodeContext) -> Value:
    dtype = dtype_of(node.attr("to", int))
    source = node.dtype(0)
    if dtype is None or source is None or dtype.itemsize != source.itemsize:
        node.refuse(
            f"it reads the bits of {source} as {dtype}; expected the same width"
        )
    return node.call(torch.Tensor.view, node.inputs[0], dtype)


@converter("Identity", dtypes=None)
def _identity(node: NodeContext) -> Value:
    if node.builder.dtypes.get(node.input_names[0], 0) is None:
        node.refuse("torch has no type for its elements")
    return node.inputs[0]


@converter("Selu")
def _selu(node: NodeContext) -> Value:
    alpha, gamma = node.attr("alpha", 1.6732632), node.attr("gamma", 1.0507010)
    if abs(alpha - 1.6732632) < 1e-6 and abs(gamma - 1.0507010) < 1e-6:
        return node.module(nn.SELU(), node.inputs[0])
    return node.call(torch.mul, node.module(nn.ELU(alpha), node.inputs[0]), gamma)


@converter("HardSigmoid")
def _hard_sigmoid(node: NodeContext) -> Value:
    alpha = node.attr("alpha", 0.2)
    beta = node.attr("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return node.module(nn.Hardsigmoid(), node.inputs[0])
    return node.call(hard_sigmoid, node.inputs[0], alpha, beta)


@converter("PRelu")
def _prelu(node: NodeContext) -> Value:
    slope = node.constant(1)
    shape = node.shape(0)
    if slope is not None and shape is not None and len(shape) >= 2:
        channels = shape[1]
        leading = slope.dim() == len(shape) - 1
        per_channel = (
            leading and slope.dim() > 0 and slope.numel() == slope.shape[0] == channels
        )
        if slope.numel() == 1 or per_channel:
            module = nn.PReLU(slope.numel())
            module.weight = nn.Parameter(slope.reshape(-1).clone())
            return node.module(module, node.inputs[0])
    return node.call(prelu, *node.inputs)


@converter("Softmax", "LogSoftmax")
def _softmax(node: NodeContext) -> Value:
    axis = node.attr("axis", -1 if node.version >= 13 else 1)
    cls = nn.Softmax if node.op_type == "Softmax" else nn.LogSoftmax
    last = node.shape(0) is not None and axis in (-1, node.ndim(0) - 1)
    if node.version >= 13 or last:
        return node.module(cls(axis), node.inputs[0])
    # Before opset 13 the axes from ``axis`` on count as one.
    flat = node.call(torch.flatten, node.inputs[0], axis)
    return node.call(torch.Tensor.view_as, node.module(cls(-1), flat), node.inputs[0])


@converter("Hardmax")
def _hardmax(node: NodeContext) -> Value:
    axis = node.attr("axis", -1 if node.version >= 13 else 1)
    if node.version >= 13:
        return node.call(hardmax, node.inputs[0], axis)
    # Before opset 13 the axes from ``axis`` on count as one.
    flat = node.call(torch.flatten, node.inputs[0], axis)
    return node.call(torch.Tensor.view_as, node.call(hardmax, flat, -1), node.inputs[0])


@converter("Clip")
def _clip(node: NodeContext) -> Value:
    x = node.inputs[0]
    has_bound = [node.input(index) is not None for index in (1, 2)]
    low = scalar_or_value(node, 1) if has_bound[0] else -torch.inf
    high = scalar_or_value(node, 2) if has_bound[1] else torch.inf
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return node.call(clip, x, node.input(1), node.input(2))
    if low == 0 and high in (6, torch.inf) and node.floating(0):
        return node.module(nn.ReLU6() if high == 6 else nn.ReLU(), x)
    bounds = [None if abs(bound) == torch.inf else bound for bound in (low, high)]
    return x if bounds == [None, None] else node.call(torch.clamp, x, *bounds)


@converter("Dropout")
def _dropout(node: NodeContext) -> list[Value]:
    training = node.input(2)
    ratio = float(node.attr("ratio", 0.5))  # an attribute up to opset 11
    trains = training is not None and bool(node.known(2, "training mode"))
    if node.constant(1) is not None or (trains and node.input(1) is not None):
        ratio = float(node.known(1, "ratio"))
    if trains and ratio > 0:
        node.refuse("it drops values at random; expected inference")
    result = node.module(nn.Dropout(ratio), node.inputs[0])
    if len(node.output_names) < 2:
        return [result]
    return [result, node.call(torch.ones_like, node.inputs[0], dtype=torch.bool)]


@one_call
def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``; integers are rounded toward zero."""
    if a.is_floating_point():
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


@one_call
def remainder(a: Tensor, b: Tensor, fmod: int) -> Tensor:
    """Return the remainder with the sign of ``b``, or of ``a`` where ``fmod`` is set."""
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@one_call
def power(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a ** b`` in the element type of ``a``."""
    if a.is_floating_point() and not b.is_floating_point():
        return torch.pow(a, b.to(a.dtype))
    return torch.pow(a, b).to(a.dtype)


@one_call
def clip(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """Return ``min(max(x, low), high)``; the upper bound wins where the bounds cross."""
    if low is not None:
        x = torch.maximum(x, low.to(x.dtype))
    return x if high is None else torch.minimum(x, high.to(x.dtype))


@one_call
def choose(flag: bool, first: int, second: int) -> int:
    """Return the first number if the flag is set, else the second."""
    return first if flag else second


@one_call
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """Return ``x``, times a slope that broadcasts from the right where it is negative."""
    return torch.where(x < 0, slope * x, x)


@one_call
def hardmax(x: Tensor, axis: int) -> Tensor:
    """Return 1 at the first largest element along ``axis``, 0 elsewhere."""
    places = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, places, 1)


@one_call
def shrink(x: Tensor, bias: float, limit: float) -> Tensor:
    """Return ``x`` moved by ``bias`` toward 0, and 0 where it is not beyond ``limit``."""
    above = torch.where(x > limit, (x - bias).to(x.dtype), 0)
    return torch.where(x < -limit, (x + bias).to(x.dtype), above)


_SAME_NAMES = """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log
    Reciprocal Round Sign Sin Sinh Sqrt Tan"""
for _name in _SAME_NAMES.split():
    row(_name, getattr(torch, _name.lower()))
for _name in ("And", "Or", "Xor"):
    row(_name, getattr(torch, f"logical_{_name.lower()}"))
for _name in ("Mish", "Sigmoid", "Softplus", "Softsign", "Tanh"):
    row(_name, getattr(nn, _name))
row("Relu", nn.ReLU)
row("HardSwish", nn.Hardswish)
row("Elu", nn.ELU, alpha=1.0)
row("Gelu", nn.GELU, approximate="none")
row("Shrink", shrink, bias=0.0, lambd=0.5)
row("LeakyRelu", nn.LeakyReLU, alpha=0.01)
