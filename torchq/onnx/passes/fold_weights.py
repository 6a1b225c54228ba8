"""Storing weights as the codes that the graph would compute from them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.formats import by_name
from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    add_initializer,
    is_constant,
    nodes_of,
    onnx_ir,
    opset_of,
    readers,
    remove_unused,
    value_of,
)
from torchq.onnx.passes.fold_constants import constant_value
from torchq.onnx.qdq import element_type, format_of, pair_name, qparams_of, write_record

__all__ = ["fold_weights"]

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FOUR_BITS_SINCE = 21  # The first opset with int4 and uint4.


def fold_weights(model: Model) -> None:
    """Replace each QuantizeLinear of a constant by its codes.

    Before::

        QuantizeLinear(clip, cast or reshape of a stored tensor) -> DequantizeLinear.

    After::

        Stored codes -> DequantizeLinear. The codes are ``snap(weight / scale)``, the arithmetic
        of :mod:`torchq.functional.fake_quant`, or ``round(weight / scale) + zero_point``, bounded,
        that of :mod:`torchq.functional.fake_quant`. Where the quantizer has 4 bits and the exporter
        wrote 8, they are stored in 4 bits from opset 21 on. The record names quantizers that only
        other stored codes followed from, as behind a table of positions; no node is left of them.
    """
    stored = []
    for node in nodes_of(model, "QuantizeLinear"):
        if not all(is_constant(v) for v in node.inputs[1:] if v is not None):
            continue
        weight = constant_value(model, node.inputs[0])
        if weight is not None:
            _store_codes(model, node, weight)
            stored.append(pair_name(node))
    remove_unused(model)
    left = {pair_name(node) for node in nodes_of(model, "DequantizeLinear")}
    folded = [name for name in stored if name not in left]
    if folded:
        write_record(model, folded=folded)


def _store_codes(model: Model, node: Node, weight: Tensor) -> None:
    qparams, dtype = qparams_of(node), _stored_type(model, node)
    codes = qparams.codes(qparams.scaled(weight))
    if dtype is not element_type(node):
        _retype_zero_points(node, dtype)
    stored = _FLOAT8.get(qparams.format.name)
    if stored is None and qparams.format.bits > 8:
        stored = torch.int16 if qparams.quant_min else torch.uint16
    elif stored is None:
        stored = torch.int8 if qparams.quant_min else torch.uint8
    name = pair_name(node) or str(node.name)
    value = add_initializer(model.graph, f"{name}/weight", codes.to(stored), dtype)
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)


def _stored_type(model: Model, node: Node) -> DataType:
    """Return the type to store: 4 bits for a quantizer of 4 bits, where the opset has them."""
    written = element_type(node)
    wanted = by_name(node.meta["format"]) if "format" in node.meta else format_of(written)
    narrow = wanted.is_integer and wanted.bits <= 4 and format_of(written).bits == 8
    if not narrow or opset_of(model) < _FOUR_BITS_SINCE:
        return written
    return onnx_ir.DataType.INT4 if format_of(written).quant_min else onnx_ir.DataType.UINT4


def _retype_zero_points(node: Node, dtype: DataType) -> None:
    """Give the readers of the codes a zero point of the type that the codes are stored in."""
    for reader in readers(node.outputs[0]):
        if len(reader.inputs) > 2 and reader.inputs[2] is not None:
            old = reader.inputs[2]
            new = add_initializer(node.graph, str(old.name), value_of(old), dtype)
            reader.replace_input_with(2, new)
