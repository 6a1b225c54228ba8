"""Kinds of torch operators: one list each for everybody who reads a model's graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

#: Operators that read the shape of a tensor and nothing else.
SHAPE = frozenset(["size", "shape", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"])

#: Operators that read what a tensor is like, not what it holds. They do not count as readers.
METADATA = SHAPE | frozenset(
    [
        *("stride", "layout", "is_contiguous", "dtype", "type", "device", "get_device"),
        *("element_size", "names", "requires_grad"),
        *("is_complex", "is_cuda", "is_floating_point", "is_quantized"),
    ]
)

#: Operators that rearrange the elements of their first argument and compute nothing. Applied to
#: codes they give the codes of what they give for values. ``Tensor.view`` counts only without a
#: dtype among its arguments.
REARRANGING = frozenset(
    [
        *("flatten", "reshape", "view", "squeeze", "unsqueeze"),
        *("permute", "transpose", "swapaxes", "movedim", "contiguous"),
        *("channel_shuffle", "pixel_shuffle"),
    ]
)

#: Operators that return the largest element of each window: they give codes of codes too.
#: The underscored names are those that torch functions see on the inside.
MAX_POOLING = frozenset(
    [
        *("max_pool1d", "max_pool2d", "max_pool3d"),
        *("_max_pool1d", "_max_pool2d", "_max_pool3d"),
    ]
)


def operator_name(target: Any) -> str:
    """Return the name of what a node calls: of a method (a string) or of a function."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def reads_metadata(node: fx.Node) -> bool:
    """Return True if ``node`` reads the shape, dtype or device of a tensor, but no element."""
    return _reads(node, METADATA)


def reads_shape(node: fx.Node) -> bool:
    """Return True if ``node`` reads the shape of a tensor and nothing else."""
    return _reads(node, SHAPE)


def _reads(node: fx.Node, names: frozenset[str]) -> bool:
    if node.op == "call_method":
        return node.target in names
    return node.op == "call_function" and node.target is getattr and node.args[1] in names


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
    """Return the kind of an operator, or None if it has none."""
    try:
        return _KINDS.get(target)
    except TypeError:  # not hashable, so no function of torch
        return None
