"""Kinds of torch operators, and what nodes do besides returning a value: views and writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

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


_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod"),
        *("ipow", "ilshift", "irshift", "iand", "ior", "ixor"),
    )
)

#: Functions and methods whose result may share memory with their input.
_VIEWS = REARRANGING | frozenset(
    [
        *("getitem", "__getitem__", "getattr", "select", "narrow", "slice", "unbind", "chunk"),
        *("split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split"),
        *("expand", "expand_as", "broadcast_to", "view_as", "reshape_as", "unflatten", "ravel"),
        *("t", "swapdims", "moveaxis", "diagonal", "unfold", "as_strided", "alias", "detach"),
        *("to", "type", "type_as", "float", "half", "double", "bfloat16", "cpu", "cuda"),
        *("real", "imag", "view_as_real", "view_as_complex", "dropout", "dropout1d"),
        *("dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "positive", "conj"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "native_dropout"),
        *("tuple", "list", "dict", "T", "mT", "lift_fresh_copy", "_to_copy", "as_tensor"),
        *("hsplit", "vsplit", "dsplit", "adjoint", "mH", "H", "resolve_conj", "resolve_neg"),
    ]
)
_VIEW_MODULES = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_KNOWN = frozenset(["torch", "torchq", "_operator", "operator", "builtins", "math"])


def writes(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if ``node`` overwrites one of its inputs, by its name or its options."""
    if node.op == "call_module":
        parts = () if module is None else module.modules()
        return any(getattr(part, "inplace", False) is True for part in parts)
    if node.op not in ("call_function", "call_method"):
        return False
    name = operator_name(node.target).split(".")[0]
    ends = name.endswith("_") and not name.endswith("__")
    special = node.target in _IN_PLACE or name == "__setitem__" or name.startswith("__i")
    return ends or special or node.kwargs.get("inplace") is True or "out" in node.kwargs


def may_write(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if ``node`` overwrites an input, or runs code that is not known and might."""
    return writes(node, module) or _is_foreign(node, module) or _has_positional_flag(node)


def may_alias(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if the result of ``node`` may share memory with one of its inputs."""
    if not node.op.startswith("call"):
        return False
    if may_write(node, module) or _home(node, module) == "torchq":
        return True  # A quantizer that is switched off returns its input.
    if node.op == "call_module":
        return isinstance(module, (*_VIEW_MODULES, nn.Sequential))
    return operator_name(node.target).split(".")[0] in _VIEWS


def _is_foreign(node: fx.Node, module: nn.Module | None) -> bool:
    return _home(node, module) not in _KNOWN


def _home(node: fx.Node, module: nn.Module | None) -> str:
    """Return the name of the package that the called module or function comes from."""
    home: Any = "torch"
    if node.op == "call_module":
        home = type(module).__module__
    elif node.op == "call_function":
        home = getattr(node.target, "__module__", None) or home
    return home.partition(".")[0]


def _has_positional_flag(node: fx.Node) -> bool:
    """Return True for ``F.relu(x, True)``, where the flag may be the one called inplace."""
    home = getattr(node.target, "__module__", None)
    flags = any(value is True for value in node.args)
    return node.op == "call_function" and home == "torch.nn.functional" and flags
