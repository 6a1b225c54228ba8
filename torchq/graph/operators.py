"""Kinds of torch operators, by name: one list each for everybody who reads a model's graph."""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = [
    "MAX_POOLING",
    "METADATA",
    "REARRANGING",
    "SHAPE",
    "operator_name",
    "reads_metadata",
    "reads_shape",
]

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
