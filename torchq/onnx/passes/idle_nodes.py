"""Nodes that return what they read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    bypass,
    computed_by,
    is_constant,
    is_output,
    nodes_of,
    readers,
    value_of,
)
from torchq.onnx.passes.fold_shapes import Shape, known_shapes
from torchq.onnx.qdq import pair_name, qparams_of, read_record, write_record

__all__ = ["drop_idle_pairs", "drop_idle_slices"]

#: Operators whose results are elements of their operands.
_JOINING = ("Concat", "MaxPool")


def drop_idle_slices(model: Model) -> None:
    """Remove each Slice that keeps all of a tensor.

    GhostNet cuts its concatenations to a number of channels that most of them have. ONNX Runtime
    copies there, and the Q/DQ pairs on both sides of the Slice stay apart.

    Before::

        Slice from the first to the last element of dimensions with known lengths.

    After::

        What the Slice reads.
    """
    slices = [node for node in nodes_of(model, "Slice") if _has_stored_bounds(node)]
    shapes = known_shapes(model) if slices else {}
    for node in slices:
        if not is_output(node.outputs[0]) and _keeps_all(node, shapes.get(node.inputs[0].name, ())):
            bypass(node)


def _has_stored_bounds(node: Node) -> bool:
    return len(node.inputs) > 2 and all(is_constant(v) for v in node.inputs[1:] if v is not None)


def _keeps_all(node: Node, shape: Shape) -> bool:
    """Return True if a Slice with stored bounds keeps every element of a tensor of this shape."""
    given = [[] if value is None else value_of(value).tolist() for value in node.inputs[1:]]
    starts, ends, axes, strides = (*given, [], [])[:4]
    axes, strides = axes or list(range(len(starts))), strides or [1] * len(starts)
    for axis, start, end, stride in zip(axes, starts, ends, strides, strict=True):
        length = shape[axis] if -len(shape) <= axis < len(shape) else None
        if not isinstance(length, int) or stride != 1:
            return False
        if not (start == 0 or start <= -length) or end < length:
            return False
    return True


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
