"""The operator Attention."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F

from torchq.frontends.building import Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions.attention import (
    AttentionOptions,
    attention,
    merge_heads,
    split_heads,
)
from torchq.frontends.onnx.reader import dtype_of
from torchq.frontends.onnx.registry import converter


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
