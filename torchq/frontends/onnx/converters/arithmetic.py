"""Elementwise arithmetic, comparisons, logic and changes of type."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchq.frontends.building import Constant, Ints, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions import elementwise
from torchq.frontends.onnx.reader import dtype_of
from torchq.frontends.onnx.registry import converter, identity

_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.linalg.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "BitwiseNot": torch.bitwise_not,
}
_BINARY: dict[str, Callable[..., Any]] = {
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}
#: From an operator to the functions for tensors and for numbers.
_NUMERIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Add": (torch.add, operator.add),
    "Sub": (torch.sub, operator.sub),
    "Mul": (torch.mul, operator.mul),
    "Equal": (torch.eq, operator.eq),
    "Greater": (torch.gt, operator.gt),
    "GreaterOrEqual": (torch.ge, operator.ge),
    "Less": (torch.lt, operator.lt),
    "LessOrEqual": (torch.le, operator.le),
}

for _name, _function in _UNARY.items():
    identity(_name, _function)


@converter(*_BINARY)
def _binary(node: NodeContext) -> Value:
    return node.call(_BINARY[node.op_type], *node.inputs)


def scalar_or_value(node: NodeContext, index: int) -> Any:
    """Return an input; a constant without dimensions as a Python number.

    A Python number keeps the element type of the tensor that it meets.
    """
    value = node.inputs[index]
    if isinstance(value, Constant) and value.tensor.dim() == 0:
        return value.tensor.item()
    return value


def _sizes_of(node: NodeContext) -> tuple[list[Any], list[Any], bool] | None:
    """Return two operands that are sizes element by element, and if the result is a scalar.

    None for other tensors.
    """
    if not any(isinstance(value, Ints) for value in node.inputs):
        return None
    first, second = node.ints(0), node.ints(1)
    if first is None or second is None or 0 in (len(first), len(second)):
        return None
    if any(
        (node.shape(i) or []) not in ([], [len(items)]) for i, items in ((0, first), (1, second))
    ):
        return None
    count = max(len(first), len(second))
    if {len(first), len(second)} - {1, count}:
        return None
    scalar = node.shape(0) == [] and node.shape(1) == []
    return first * (count // len(first)), second * (count // len(second)), scalar


@converter(*_NUMERIC)
def _numeric(node: NodeContext) -> Value:
    on_tensors, on_numbers = _NUMERIC[node.op_type]
    sizes = _sizes_of(node)
    if sizes is not None:
        first, second, scalar = sizes
        pairs = zip(first, second, strict=True)
        dtype = None if node.op_type in ("Add", "Sub", "Mul") else torch.bool
        return node.sizes([node.arithmetic(on_numbers, a, b) for a, b in pairs], scalar, dtype)
    first_value, second_value = node.inputs
    if isinstance(first_value, fx.Node):
        second_value = scalar_or_value(node, 1)
    elif isinstance(second_value, fx.Node) and node.op_type in ("Add", "Mul"):
        first_value, second_value = second_value, scalar_or_value(node, 0)
    bias = _as_bias(node) if node.op_type == "Add" else None
    return node.call(on_tensors, first_value, second_value) if bias is None else bias


def _as_bias(node: NodeContext) -> Value:
    """Give a constant to the linear layer without a bias that it is added to.

    None if there is no such layer.
    """
    for layer, other in (node.inputs, node.inputs[::-1]):
        if isinstance(layer, fx.Node) and isinstance(other, Constant):
            return node.builder.add_bias(layer, other)
    return None


@converter("Div")
def _div(node: NodeContext) -> Value:
    sizes = _sizes_of(node)
    if sizes is not None:  # sizes are not negative, so that rounding down is rounding toward zero
        first, second, scalar = sizes
        pairs = zip(first, second, strict=True)
        return node.sizes([node.arithmetic(operator.floordiv, a, b) for a, b in pairs], scalar)
    if node.floating(0):
        return node.call(torch.div, node.inputs[0], scalar_or_value(node, 1))
    return node.call(elementwise.divide, *node.inputs)


@converter("Mod")
def _mod(node: NodeContext) -> Value:
    return node.call(elementwise.remainder, *node.inputs, bool(node.attr("fmod", 0)))


@converter("Pow")
def _pow(node: NodeContext) -> Value:
    exponent = scalar_or_value(node, 1)
    if node.floating(0) and isinstance(exponent, (int, float)):
        return node.call(torch.pow, node.inputs[0], exponent)
    return node.call(elementwise.power, *node.inputs)


@converter("Max", "Min", "Sum", "Mean")
def _variadic(node: NodeContext) -> Value:
    if len(node.inputs) == 1:
        return node.inputs[0]
    if node.op_type == "Sum" and len(node.inputs) == 2:
        return node.call(torch.add, *node.inputs)
    functions = {
        "Max": elementwise.maximum,
        "Min": elementwise.minimum,
        "Sum": elementwise.total,
        "Mean": elementwise.mean_of,
    }
    return node.call(functions[node.op_type], list(node.inputs))


@converter("IsInf")
def _is_inf(node: NodeContext) -> Value:
    positive, negative = (
        bool(node.attr("detect_positive", 1)),
        bool(node.attr("detect_negative", 1)),
    )
    if positive and negative:
        return node.call(torch.isinf, node.inputs[0])
    if not positive and not negative:
        return node.call(torch.zeros_like, node.inputs[0], dtype=torch.bool)
    return node.call(torch.isposinf if positive else torch.isneginf, node.inputs[0])


@converter("Not")
def _not(node: NodeContext) -> Value:
    value = node.inputs[0]
    if isinstance(value, Ints):
        items = [node.arithmetic(operator.not_, item) for item in value.items]
        return node.sizes(items, value.scalar, torch.bool)
    return node.call(torch.logical_not, value)


@converter("Where")
def _where(node: NodeContext) -> Value:
    condition, flags = node.constant(0), node.inputs[0]
    taken = list(flags.items) if isinstance(flags, Ints) else None
    if condition is not None and condition.dim() == 1:
        taken = condition.tolist()
    is_sizes = any(isinstance(value, Ints) for value in node.inputs)
    columns = [items for items in (taken, node.ints(1), node.ints(2)) if items is not None]
    if is_sizes and len(columns) == 3 and len(set(map(len, columns))) == 1:
        rows = zip(*columns, strict=True)
        items = [node.arithmetic(elementwise.choose, *row) for row in rows]
        scalar = all(node.shape(index) == [] for index in range(3))
        return node.sizes(items, scalar, node.dtype(1))
    return node.call(torch.where, *node.inputs)


@converter("Cast", dtypes=None)
def _cast(node: NodeContext) -> Value:
    dtype = dtype_of(node.required("to"))
    source = node.dtype(0)
    if dtype is None or (
        source is None and node.builder.dtypes.get(node.input_names[0], 0) is None
    ):
        node.refuse("torch has no type for its elements")
    return _convert_type(node, dtype)


@converter("CastLike", dtypes=None)
def _cast_like(node: NodeContext) -> Value:
    dtype = node.dtype(1)
    if dtype is None or (node.dtype(0) is None and node.input_names[0] in node.builder.dtypes):
        node.refuse("torch has no type for its elements, or the type is not known")
    return _convert_type(node, dtype)


#: The element types in which sizes are whole numbers; float64 holds all of them, float32 those of
#: dimensions.
_OF_SIZES = (torch.int64, torch.int32, torch.float32, torch.float64)


def _convert_type(node: NodeContext, dtype: torch.dtype) -> Value:
    value = node.inputs[0]
    if isinstance(value, Ints) and value.dtype is not torch.bool:
        if dtype in _OF_SIZES:
            return node.sizes(value.items, value.scalar, dtype)
        if dtype is torch.bool:
            flags = [node.arithmetic(operator.ne, item, 0) for item in value.items]
            return node.sizes(flags, value.scalar, dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return node.call(
            elementwise.cast_float8, node.inputs[0], dtype, bool(node.attr("saturate", 1))
        )
    if node.dtype(0) is dtype:
        return node.inputs[0]
    return node.call(torch.Tensor.to, node.inputs[0], dtype)


@converter("Identity", dtypes=None)
def _identity(node: NodeContext) -> Value:
    if node.builder.dtypes.get(node.input_names[0], 0) is None:
        node.refuse("torch has no type for its elements")
    return node.inputs[0]
