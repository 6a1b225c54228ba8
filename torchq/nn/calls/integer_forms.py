"""Calls with a weight as integer kernels take them: which operand is which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torchq.graph import operator_of
from torchq.nn.calls.routes import operand
from torchq.nn.integer_kernel import CallOperands, Multiply

#: Where calls with a weight have their bias.
BIAS = (2, "bias")
#: Products of matrices of which kernels take the second operand as a weight, (in, out).
_MATRIX_PRODUCTS = ("matmul", "mm")


@dataclass(frozen=True, eq=False)
class IntegerForm:
    """What a call multiplies, and how."""

    operands: CallOperands
    multiply: Multiply


def integer_form(
    function: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> IntegerForm | None:
    """Return a call with a weight as integer kernels take it; None for calls that none takes."""
    row = operator_of(function)
    if row is None:
        return None
    x, weight = operand(args, kwargs, row.left), operand(args, kwargs, row.right)
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    if row.name.startswith("conv") and "transpose" not in row.name:
        return _convolution(function, args, kwargs, x, weight)
    if row.name == "linear":
        operands = CallOperands(x, weight, operand(args, kwargs, BIAS), False, True)
        return IntegerForm(operands, F.linear)
    if weight.dim() != 2:
        return None
    if row.name in _MATRIX_PRODUCTS and len(args) == 2 and not kwargs:
        return IntegerForm(CallOperands(x, weight, None, True, True), F.linear)
    bias = args[0] if args else None
    is_plain = row.name == "addmm" and len(args) == 3 and not kwargs
    if is_plain and isinstance(bias, Tensor) and bias.dim() == 1:
        return IntegerForm(CallOperands(x, weight, bias, True, True), F.linear)
    return None


def _convolution(
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, object],
    x: Tensor,
    weight: Tensor,
) -> IntegerForm:
    options = {
        name: value
        for name, value in kwargs.items()
        if name not in ("input", "weight", "bias")
    }

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = function(x, weight, bias, *args[3:], **options)
        return result

    bias = operand(args, kwargs, BIAS)
    return IntegerForm(CallOperands(x, weight, bias, False, False), multiply)
