"""Reductions, and the places of extreme elements."""

from __future__ import annotations

import torch

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import elementwise
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter


@converter("sum", "sum_axis", "mean", "prod", "max", "max_axis", "min", "min_axis")
@converter("nansum", "nanprod")
def _reduce(node: SymbolContext) -> Value:
    kind = node.op_type.partition("_")[0]
    axes = node.ints("axis", [])
    options = node.flag("keepdims", False), node.flag("exclude", False)
    return node.call(elementwise.reduce, node.inputs[0], kind, axes, *options)


@converter("norm")
def _norm(node: SymbolContext) -> Value:
    order, keepdims = node.integer("ord", 2), node.flag("keepdims", False)
    node.expect("out_dtype", "float32")
    return node.call(elementwise.norm, node.inputs[0], order, node.ints("axis", []), keepdims)


def _axis(node: SymbolContext, default: int | None) -> int | None:
    """Return the attribute ``axis``, None for all elements as one line."""
    if "axis" not in node.attributes:
        return default
    return None if node.attr("axis") is None else node.integer("axis")


@converter("argmax", "argmin")
def _extreme(node: SymbolContext) -> Value:
    axis, keepdims = _axis(node, None), node.flag("keepdims", False)
    found = node.call(elementwise.top, node.inputs[0], node.op_type, axis, 1, False)
    if axis is None:
        return node.call(torch.reshape, found, [1])
    return node.call(torch.unsqueeze, found, axis) if keepdims else found


@converter("argmax_channel")
def _argmax_channel(node: SymbolContext) -> Value:
    return node.call(elementwise.top, node.inputs[0], "argmax", 1, 1, False)


@converter("sort", "argsort")
def _sort(node: SymbolContext) -> Value:
    ascending = node.flag("is_ascend", True)
    node.expect("dtype", "float32")
    axis = (
        None
        if "axis" in node.attributes and node.attr("axis") is None
        else node.integer("axis", -1)
    )
    return node.call(elementwise.top, node.inputs[0], node.op_type, axis, 0, ascending)


@converter("topk")
def _topk(node: SymbolContext) -> Value | list[Value]:
    count, ascending = node.integer("k", 1), node.flag("is_ascend", False)
    node.expect("dtype", "float32")
    axis = (
        None
        if "axis" in node.attributes and node.attr("axis") is None
        else node.integer("axis", -1)
    )
    kind = node.text("ret_typ", "indices")
    if kind not in ("indices", "value", "mask", "both"):
        node.refuse(f"ret_typ is {kind!r}; expected indices, value, mask or both")
    kinds = ["value", "indices"] if kind == "both" else [kind]
    return [
        node.call(elementwise.top, node.inputs[0], each, axis, count, ascending) for each in kinds
    ]
