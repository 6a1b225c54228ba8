"""What nodes do besides returning a value: they overwrite tensors, or return parts of their inputs.

An in-place ReLU changes the result of the node before it. These rules tell where this may happen,
so that a result can be copied before.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from torchq.graph.operators import REARRANGING, operator_name

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
