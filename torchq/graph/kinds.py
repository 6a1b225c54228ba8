"""Kinds of operators whose operands can be quantized, and the torch functions of each kind."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["ALL_KINDS", "operator_kind"]

_FUNCTIONS: dict[str, list[Any]] = {
    "add": [operator.add, operator.iadd, torch.add, "add", "add_"],
    "mul": [operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"],
    "matmul": [
        *(operator.matmul, operator.imatmul, torch.matmul, torch.bmm),
        *("matmul", "bmm"),
    ],
    "cat": [torch.cat, torch.concat, torch.concatenate],
    "pool": [
        *(F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool2d),
        *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.avg_pool1d),
        *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        *(torch.mean, "mean"),
    ],
    "attention": [F.scaled_dot_product_attention],
    "activation": [
        *(F.silu, F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu, F.mish),
        *(F.sigmoid, torch.sigmoid, "sigmoid"),
    ],
}
_KINDS = {target: kind for kind, targets in _FUNCTIONS.items() for target in targets}

#: Every kind that :func:`operator_kind` returns.
ALL_KINDS = frozenset(_FUNCTIONS)


def operator_kind(target: Any) -> str | None:
    """Return the kind of an operator, or None if it has none.

    Args:
        target: a function, or the name of a method of tensors.

    Example:
        >>> operator_kind(torch.cat), operator_kind("add_"), operator_kind(torch.exp)
        ('cat', 'add', None)
    """
    try:
        return _KINDS.get(target)
    except TypeError:  # not hashable, so no function of torch
        return None
