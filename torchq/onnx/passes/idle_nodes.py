"""Nodes that return what they read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    computed_by,
    is_constant,
    is_output,
    nodes_of,
    readers,
)
from torchq.onnx.qdq import pair_name, qparams_of, read_record, write_record

__all__ = ["drop_idle_pairs"]

#: Operators whose results are elements of their operands.
_JOINING = ("Concat", "MaxPool")


def drop_idle_pairs(model: Model) -> None:
    """Remove each Q/DQ pair that quantizes a concatenation of codes as these are already.

    Before::

        All operands of a Concat or MaxPool come from DequantizeLinear with the same
        parameters, and a Q/DQ pair with these parameters reads the result.

    After::

        What read that pair reads the result. The record has the quantizer under ``merged``, with
        that of an operand.
    """
    merged: dict[str, str] = {}
    for quantize in nodes_of(model, "QuantizeLinear"):
        source = computed_by(quantize.inputs[0], *_JOINING)
        origin = None if source is None else _origin(source)
        pairs = readers(quantize.outputs[0])
        if origin is None or not _alike(origin, quantize):
            continue
        if any(pair.op_type != "DequantizeLinear" or is_output(pair.outputs[0]) for pair in pairs):
            continue
        merged[pair_name(quantize)] = pair_name(origin)
        for pair in pairs:
            pair.outputs[0].replace_all_uses_with(quantize.inputs[0])
            model.graph.remove(pair, safe=True)
        model.graph.remove(quantize, safe=True)
    known = {**read_record(model).get("merged", {}), **merged}
    write_record(model, merged={name: _last(known, name) for name in known})


def _last(merged: Mapping[str, str], name: str) -> str:
    """Return the quantizer that is left, where one was merged with another that was merged too."""
    while name in merged:
        name = merged[name]
    return name


def _origin(node: Node) -> Node | None:
    """Return a QuantizeLinear with the parameters of all that a node puts together."""
    found = [_quantizer(value) for value in node.inputs]
    first = found[0] if found else None
    if first is None:
        return None
    alike = all(other is not None and _alike(first, other) for other in found)
    return first if alike else None


def _quantizer(value: Value | None) -> Node | None:
    """Return the QuantizeLinear of dequantized codes, also behind what puts several together."""
    node = computed_by(value, "DequantizeLinear", *_JOINING)
    if node is None or node.op_type in _JOINING:
        return None if node is None else _origin(node)
    quantize = computed_by(node.inputs[0], "QuantizeLinear")
    same = quantize is not None and list(quantize.inputs[1:]) == list(node.inputs[1:])
    return quantize if same else None


def _alike(one: Node, other: Node) -> bool:
    """Return True if two QuantizeLinear nodes have the same stored parameters, for all codes."""
    if not all(is_constant(v) for n in (one, other) for v in n.inputs[1:] if v is not None):
        return False
    first, second = qparams_of(one), qparams_of(other)
    return (
        first.format == second.format
        and first.scale.numel() == second.scale.numel() == 1
        and torch.equal(first.scale.reshape(-1), second.scale.reshape(-1))
        and torch.equal(first.zero_point.reshape(-1), second.zero_point.reshape(-1))
    )
