"""The lengths that names of dimensions stand for: terms such as ``2*length + 1``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
#: Functions of terms that torch writes (``torch/utils/_sympy/functions.py``), and of sympy.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "CeilToInt": math.ceil,
    "ceiling": math.ceil,
    "FloorToInt": math.floor,
    "floor": math.floor,
    "TruncToInt": math.trunc,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ToFloat": float,
    "Max": max,
    "Min": min,
}


def length_of(name: str, lengths: Mapping[str, int]) -> int | None:
    """Return the length that a name, or a term of names, stands for; None where it is not known.

    The term is read from its syntax tree: nothing of a file is executed.
    """
    if name in lengths:
        return lengths[name]
    try:
        value = _value(ast.parse(name, mode="eval").body, lengths)
        length = int(value)
    except (
        *(ArithmeticError, KeyError, RecursionError),
        *(MemoryError, SyntaxError, TypeError, ValueError),
    ):
        return None
    return length if length == value and length > 0 else None


def _value(node: ast.expr, lengths: Mapping[str, int]) -> Any:
    """Return the number of a term; KeyError where a part of it is not known."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name):
        return lengths[node.id]
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, lengths))
    if isinstance(node, ast.BinOp):
        left = _value(node.left, lengths)
        right = _value(node.right, lengths)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = [_value(argument, lengths) for argument in node.args]
        return _FUNCTIONS[node.func.id](*arguments)
    raise KeyError(ast.dump(node))
