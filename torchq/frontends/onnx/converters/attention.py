"""Attention: the operator of ONNX itself, and those into which ONNX Runtime fuses it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions.attention import (
    AttentionOptions,
    attention,
    merge_heads,
    split_heads,
)
from torchq.frontends.onnx.qoperators import MICROSOFT
from torchq.frontends.onnx.reader import dtype_of
from torchq.frontends.onnx.registry import converter

__all__ = ["key_mask"]


@converter("Attention")
def _attention(node: NodeContext) -> list[Value]:
    precision = dtype_of(node.attr("softmax_precision", 0))
    options = AttentionOptions(
        node.attr("scale"),
        bool(node.attr("is_causal", 0)),
        node.attr("q_num_heads", 0),
        node.attr("kv_num_heads", 0),
        node.attr("softcap", 0.0),
        node.attr("qk_matmul_output_mode", 0),
        node.attr("left_window_size", -1),
        node.attr("right_window_size", -1),
        precision,
    )
    rest = [node.input(index) for index in range(3, 7)]
    return _called(node, [node.input(i) for i in range(3)], rest, options)


def _called(
    node: NodeContext, parts: list[Value], rest: list[Value], options: AttentionOptions
) -> list[Value]:
    """Write a call of torch's attention where it has the meaning, else of the general function."""
    wanted = [name for name in node.output_names if name]
    same = options.heads == options.kv_heads and options.softcap == 0 and not any(rest)
    plain = max(options.left, options.right) < 0 and not options.causal
    if len(wanted) > 1 or not same or not plain or options.precision is not None:
        return node.call_parts(4, attention, *parts, *rest, dataclasses.astuple(options))
    if not options.heads and not _has_equal_heads(node):
        return node.call_parts(4, attention, *parts, *rest, dataclasses.astuple(options))
    if options.heads:
        parts = [node.call(split_heads, part, options.heads) for part in parts]
    scale = {} if options.scale is None else {"scale": options.scale}
    y = node.call(F.scaled_dot_product_attention, *parts, **scale)
    return [node.call(merge_heads, y) if options.heads else y]


def _has_equal_heads(node: NodeContext) -> bool:
    shapes = [node.shape(index) or [] for index in range(3)]
    counts = {shape[1] if len(shape) == 4 else None for shape in shapes}
    return len(counts) == 1 and None not in counts


@converter("MultiHeadAttention", domain=MICROSOFT)
def _multi_head(node: NodeContext) -> list[Value]:
    if any(node.input(index) is not None for index in (6, 7, 8)):
        node.refuse("a cache of keys and values is not supported")
    parts = [node.input(index) for index in range(3)]
    if None in parts or any(len(node.shape(i) or ()) != 3 for i in range(3)):
        node.refuse("packed queries, keys and values are not supported")
    bias = node.input(3)
    if bias is not None:
        pieces = node.call_parts(3, torch.tensor_split, bias, 3)
        parts = [node.call(torch.add, x, b) for x, b in zip(parts, pieces, strict=True)]
    return _microsoft(node, parts, node.input(4), node.input(5))


@converter("Attention", domain=MICROSOFT)
def _packed(node: NodeContext) -> list[Value]:
    if node.input(4) is not None or node.attr("qkv_hidden_sizes") or node.attr("do_rotary", 0):
        node.refuse("a cache, sizes of their own, or rotary positions are not supported")
    weight, bias = node.input(1), node.input(2)
    if not isinstance(weight, Constant) or not isinstance(bias, (Constant, type(None))):
        node.refuse("its weight is computed by the network; expected a constant")
    inputs, outputs = weight.tensor.shape
    layer = nn.Linear(inputs, outputs, bias is not None, device="meta")
    layer.weight = node.builder.parameter(weight, "transposed", weight.tensor.t())
    if bias is not None:
        layer.bias = node.builder.parameter(bias)
    packed = node.module(layer, node.inputs[0], name=f"{node.name}.qkv")
    parts = node.call_parts(3, torch.chunk, packed, 3, -1)
    return _microsoft(node, parts, node.input(3), node.input(5))


def _microsoft(node: NodeContext, parts: list[Value], mask: Value, bias: Value) -> list[Value]:
    """Convert what the fused operators share: heads, a mask of keys, a bias of the products."""
    heads, scale = node.required("num_heads"), node.attr("scale", 0.0) or None
    causal = bool(node.attr("unidirectional", 0))
    if mask is not None:
        if len(node.shape(node.inputs.index(mask)) or ()) > 3:
            node.refuse("a mask of four dimensions is not supported")
        number = node.attr("mask_filter_value", -10000.0)
        added = node.call(key_mask, mask, parts[1], number)
        bias = added if bias is None else node.call(torch.add, added, bias)
    options = AttentionOptions(scale, causal, heads, heads)
    return _called(node, parts, [bias, None, None, None], options)


def key_mask(mask: Tensor, k: Tensor, number: float) -> Tensor:
    """Return what is added to the products of queries and keys for a mask of ONNX Runtime.

    Args:
        mask: (batch,) valid keys; (batch, keys) or (batch, queries, keys) with 1 for valid ones.
        k: (batch, keys, features).
        number: what is added for the others.
    """
    if mask.dim() == 1:
        mask = torch.arange(k.shape[1], device=k.device) < mask.unsqueeze(1)
    mask = mask.unsqueeze(1) if mask.dim() == 3 else mask[:, None, None, :]
    return (mask == 0).to(k.dtype) * number
