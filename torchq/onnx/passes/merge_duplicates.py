"""Keeping one of several equal tensors and Q/DQ pairs."""

from __future__ import annotations

from typing import Any

from torchq.onnx.ir import Model, is_output, nodes_of
from torchq.onnx.qdq import pair_name, read_record, write_record
from torchq.utils.optional import OptionalModule

__all__ = ["merge_duplicates"]

_passes: Any = OptionalModule("onnx_ir.passes.common", "torchq.onnx")
#: The comparison keeps a copy of every tensor, so larger ones (in elements) are left alone.
_LARGEST = 2**26


def merge_duplicates(model: Model) -> None:
    """Keep one of equal stored tensors, and one of Q/DQ nodes that do the same to one tensor.

    Before::

        Each quantizer has a scale, a zero point and a Q/DQ pair of its own.

    After::

        A tensor is quantized once with one set of parameters. The record has under ``merged``
        each quantizer that was removed, with the one that does its work.
    """
    _passes.DeduplicateInitializersPass(size_limit=_LARGEST)(model)
    merged: dict[str, str] = {}
    kept: dict[tuple[Any, ...], Any] = {}
    for node in nodes_of(model, "QuantizeLinear", "DequantizeLinear"):
        settings = tuple(sorted((a.name, repr(a.value)) for a in node.attributes.values()))
        key = (node.op_type, *node.inputs, settings)
        if key not in kept:
            kept[key] = node
        elif not is_output(node.outputs[0]):
            node.outputs[0].replace_all_uses_with(kept[key].outputs[0])
            model.graph.remove(node, safe=True)
            merged[pair_name(node)] = pair_name(kept[key])
    write_record(model, merged={**read_record(model).get("merged", {}), **merged})
