"""Q/DQ pairs: their names, the codes of weights, equal ones, and how to keep one apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.formats import format_by_name
from torchq.functional.onnx_ops import FOUR_BITS
from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    are_constant,
    data_type,
    fresh_name,
    input_at,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    opset_of,
    readers,
    remove_unused,
    value_of,
)
from torchq.onnx.passes.constants import constant_value
from torchq.onnx.qdq import (
    add_to_record,
    element_type,
    format_of,
    pair_name,
    qparams_of,
    write_record,
)
from torchq.utils.optional import OptionalModule

_passes: Any = OptionalModule("onnx_ir.passes.common", "torchq.onnx")


_MODULE_NAMES = "name_scopes"


def remove_debug_metadata(model: Model) -> None:
    """Remove stack traces and comments, and keep the names of modules.

    ``onnx_ir`` has a pass that removes all metadata; it would also remove the names of modules,
    which tell the readers of a file where a node comes from.

    Before: Nodes carry stack traces, which hold paths of the machine and are most of a small file.
    After: The only metadata of a node is the list of the modules that it comes from.
    """
    model.graph.metadata_props.clear()
    for node in model.graph:
        for key in [
            key for key in node.metadata_props if not key.endswith(_MODULE_NAMES)
        ]:
            del node.metadata_props[key]
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fold_weights(model: Model) -> None:
    """Replace each QuantizeLinear of a constant by its codes.

    Before: QuantizeLinear(clip, cast or reshape of a stored tensor) -> DequantizeLinear.
    After: Stored codes -> DequantizeLinear. The codes are ``snap(weight / scale)``, the arithmetic
    of :mod:`torchq.functional.fake_quant`, or ``round(weight / scale) + zero_point``, bounded, that
    of :mod:`torchq.functional.fake_quant`. Where the quantizer has 4 bits and the exporter wrote 8,
    they are stored in 4 bits from opset 21 on. The record names quantizers that only other stored
    codes followed from, as behind a table of positions; no node is left of them.
    """
    stored = []
    for node in nodes_of(model, "QuantizeLinear"):
        if not are_constant(node.inputs[1:]):
            continue
        weight = constant_value(model, node.inputs[0])
        if weight is not None:
            _store_codes(model, node, weight)
            stored.append(pair_name(node))
    remove_unused(model)
    not_folded = {pair_name(node) for node in nodes_of(model, "DequantizeLinear")}
    folded = [name for name in stored if name not in not_folded]
    if folded:
        write_record(model, folded=folded)


def _store_codes(model: Model, node: Node, weight: Tensor) -> None:
    qparams = qparams_of(node)
    dtype = _stored_type(model, node)
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
    number_format = (
        format_by_name(node.meta["format"])
        if "format" in node.meta
        else format_of(written)
    )
    narrow = (
        number_format.is_integer
        and number_format.bits <= 4
        and format_of(written).bits == 8
    )
    if not narrow or opset_of(model) < FOUR_BITS:
        return written
    return (
        onnx_ir.DataType.INT4
        if format_of(written).quant_min
        else onnx_ir.DataType.UINT4
    )


def _retype_zero_points(node: Node, dtype: DataType) -> None:
    """Give the readers of the codes a zero point of the type that the codes are stored in."""
    for reader in readers(node.outputs[0]):
        _own_zero_point(reader, dtype)


def _own_zero_point(reader: Node, dtype: DataType) -> None:
    """Give a node a zero point of its own, of a type, where it has one."""
    old = input_at(reader, 2)
    if old is not None:
        new = add_initializer(reader.graph, str(old.name), value_of(old), dtype)
        reader.replace_input_with(2, new)


#: The comparison keeps a copy of every tensor, so larger ones (in elements) are left alone.
_LARGEST = 2**26


def merge_duplicates(model: Model) -> None:
    """Keep one of equal stored tensors, and one of Q/DQ nodes that do the same to one tensor.

    Before: Each quantizer has a scale, a zero point and a Q/DQ pair of its own.
    After: A tensor is quantized once with one set of parameters, also where a quantizer reads what
    one with the same parameters gives: its codes are those. The record has under ``merged``
    each quantizer that was removed, with the one that does its work. Zero points of weights stay
    apart: sessions with ``session.x64quantprecision`` refuse a file whose weights share one.
    """
    _passes.DeduplicateInitializersPass(size_limit=_LARGEST)(model)
    merged: dict[str, str] = {}
    first_by_key: dict[tuple[Any, ...], Any] = {}
    for node in nodes_of(model, "QuantizeLinear", "DequantizeLinear"):
        key = (node.op_type, *node.inputs, _settings(node))
        first = _quantizer_repeated(node)
        if first is not None and not is_output(node.outputs[0]):
            node.outputs[0].replace_all_uses_with(first.outputs[0])
            model.graph.remove(node, safe=True)
            merged[pair_name(node)] = merged.get(pair_name(first), pair_name(first))
        elif key not in first_by_key:
            first_by_key[key] = node
        elif not is_output(node.outputs[0]):
            node.outputs[0].replace_all_uses_with(first_by_key[key].outputs[0])
            model.graph.remove(node, safe=True)
            merged[pair_name(node)] = pair_name(first_by_key[key])
    for node in nodes_of(model, "DequantizeLinear"):
        zero_point = input_at(node, 2)
        is_shared = zero_point is not None and len(readers(zero_point)) > 1
        if (
            is_shared
            and is_constant(node.inputs[0])
            and data_type(zero_point).name == "INT8"
        ):
            _own_zero_point(node, data_type(zero_point))
    add_to_record(model, "merged", merged)


def _quantizer_repeated(node: Node) -> Node | None:
    """Return the QuantizeLinear whose codes another one gives again; None for any other node."""
    dequantize = node.inputs[0].producer()
    if node.op_type != "QuantizeLinear" or dequantize is None:
        return None
    first = (
        dequantize.inputs[0].producer() if dequantize.inputs[0] is not None else None
    )
    if dequantize.op_type != "DequantizeLinear" or first is None:
        return None
    is_same = (
        first.op_type == "QuantizeLinear"
        and first.inputs[1:] == dequantize.inputs[1:] == node.inputs[1:]
        and _settings(first) == _settings(dequantize) == _settings(node)
    )
    return first if is_same else None


def _settings(node: Node) -> tuple[tuple[str, str], ...]:
    """Return the attributes of a node, to compare them."""
    return tuple(sorted((a.name, repr(a.value)) for a in node.attributes.values()))


def separate(value: Value, reader: Node | None = None) -> None:
    """Let all readers of a computed value, or one of them, read the larger one of it and itself.

    That is the value, and no runtime has a kernel for Max that a quantizer becomes a part of.
    """
    producer = value.producer()
    uses = [use for use in value.uses() if reader in (None, use[0])]
    assert producer is not None
    name = fresh_name(producer.graph, f"{value.name}/larger")
    larger = add_node(producer, "Max", [value, value], name)
    for user, index in uses:
        user.replace_input_with(index, larger)


#: In the names of pairs whose codes are those of a quantizer behind them.
_SAME = "/same"


def repeats_a_quantizer(node: Node) -> bool:
    """Return True for a QuantizeLinear that :func:`insert_pair` made."""
    return _SAME in str(node.name)


def insert_pair(node: Node, parameters: list[Value]) -> None:
    """Insert a QuantizeLinear and a DequantizeLinear behind a node, for all its readers."""
    name = fresh_name(node.graph, f"{node.name}{_SAME}")
    result = node.outputs[0]
    users = list(result.uses())
    codes = add_node(node, "QuantizeLinear", [result, *parameters], f"{name}/codes")
    value = add_node(
        codes.producer(), "DequantizeLinear", [codes, *parameters], f"{name}/value"
    )
    for user, index in users:
        user.replace_input_with(index, value)


def clip_beyond(node: Node, quantize: Node) -> Value:
    """Add a Clip behind a node, with ends that no code of a QuantizeLinear stands for.

    It changes no value of these codes, and keeps what is in front of it apart from what is behind.
    """
    qparams = qparams_of(quantize)
    most = float(qparams.scale.max()) * 2.0**qparams.format.bits
    name = fresh_name(node.graph, f"{node.name}/whole")
    ends = [
        add_initializer(node.graph, f"{name}/{end}", torch.tensor(number))
        for end, number in (("low", -most), ("high", most))
    ]
    return add_node(node, "Clip", [node.outputs[0], *ends], name)
