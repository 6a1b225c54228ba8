"""QuantizeLinear and DequantizeLinear nodes: parameters, names, and the file's record."""

from __future__ import annotations

import json
from typing import Any

import torch

from torchq.formats import Format, IntFormat, format_by_name
from torchq.functional import QParams
from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    Value,
    add_initializer,
    attribute,
    computed_by,
    data_type,
    input_at,
    is_constant,
    nodes_of,
    onnx_ir,
    readers,
    value_of,
)

#: Ends the names of quantized weights that are stored as the float values of their codes.
FLOAT_WEIGHT = "/float weight"
#: In the names of convolutions that a runtime computes averages with.
AVERAGE = "/average"
_RECORD = "torchq"
_FLOAT8 = {"FLOAT8E4M3FN": "e4m3", "FLOAT8E5M2": "e5m2"}


def format_of(dtype: DataType) -> Format:
    """Return torchq's format of an ONNX type that QuantizeLinear writes."""
    return format_by_name(_FLOAT8.get(dtype.name, dtype.name.lower()))


def axis_of(node: Node) -> int:
    """Return the axis of a QuantizeLinear or DequantizeLinear."""
    return int(attribute(node, "axis", 1))


def element_type(quantize: Node) -> DataType:
    """Return the type that a QuantizeLinear writes."""
    zero_point = input_at(quantize, 2)
    if zero_point is not None:
        return data_type(zero_point)
    chosen = attribute(quantize, "output_dtype", 0)
    return onnx_ir.DataType(chosen) if chosen else onnx_ir.DataType.UINT8


def qparams_of(node: Node) -> QParams:
    """Return the parameters of a node whose scale and zero point are stored."""
    quantizes = node.op_type == "QuantizeLinear"
    dtype = element_type(node) if quantizes else data_type(node.inputs[0])
    scale = value_of(node.inputs[1]).to(torch.float32)
    stored = input_at(node, 2)
    zero_point = (
        torch.zeros_like(scale)
        if stored is None
        else value_of(stored).to(torch.float32)
    )
    block_size = int(attribute(node, "block_size", 0))
    return QParams(scale, zero_point, format_of(dtype), axis_of(node), block_size)


def set_qparams(quantize: Node, qparams: QParams) -> None:
    """Give a QuantizeLinear, and each DequantizeLinear of its codes, new per-tensor parameters."""
    graph = quantize.graph
    name = pair_name(quantize)
    stored = torch.uint8 if not qparams.quant_min else torch.int8
    if isinstance(qparams.format, IntFormat) and qparams.format.width > 8:
        stored = torch.uint16 if not qparams.quant_min else torch.int16
    zero_point = (
        qparams.zero_point.to(torch.int32).reshape(qparams.scale.shape).to(stored)
    )
    inputs = (
        add_initializer(graph, f"{name}/scale", qparams.scale),
        add_initializer(graph, f"{name}/zero_point", zero_point),
    )
    pair = [n for n in readers(quantize.outputs[0]) if n.op_type == "DequantizeLinear"]
    for node in (quantize, *pair):
        node.resize_inputs(3)
        node.replace_input_with(1, inputs[0])
        node.replace_input_with(2, inputs[1])
        node.attributes.pop("output_dtype", None)
    quantize.outputs[0].type = onnx_ir.TensorType(data_type(inputs[1]))


def store_codes(quantize: Node, signed: bool) -> bool:
    """Store the codes of an activation of 8 or 16 bits as another type; return True if that moved.

    Before: A QuantizeLinear with one stored scale. After: Its codes, and the zero point, are moved
    by half their number where they had the other sign, so every value stays what it was.
    """
    stored = all(
        is_constant(value) for value in quantize.inputs[1:] if value is not None
    )
    if not stored or quantize.inputs[1].const_value.size != 1:
        return False
    old = qparams_of(quantize)
    new = old.stored(signed)
    if new is not old:
        set_qparams(quantize, new)
    return new is not old


def pair_name(node: Node) -> str:
    """Return the quantizer that a QuantizeLinear or DequantizeLinear is named after."""
    return str(node.name or "").rpartition("/")[0]


def path_of(name: str) -> str:
    """Return the path of a quantizer, without the number of its call."""
    return name.partition("#")[0]


def shared_name(node: Node) -> str:
    """Return the quantizer of a node without the number of the call, or else its output's name."""
    return path_of(pair_name(node)) or str(node.outputs[0].name)


def quantizer_nodes(model: Model) -> dict[str, Node]:
    """Return the QuantizeLinear of each quantizer of an activation, by name and in order."""
    return {
        pair_name(node): node
        for node in nodes_of(model, "QuantizeLinear")
        if str(node.name).endswith("/QuantizeLinear") and is_constant(node.inputs[1])
    }


def weight_nodes(model: Model) -> dict[str, Node]:
    """Return the DequantizeLinear of each weight that is stored as codes, by its quantizer."""
    return {
        pair_name(node): node
        for node in nodes_of(model, "DequantizeLinear")
        if is_constant(node.inputs[0])
    }


def float_weights(model: Model) -> dict[str, Value]:
    """Return the weights that are stored as float values, by their quantizers."""
    return {
        name.removesuffix(FLOAT_WEIGHT): value
        for name, value in model.graph.initializers.items()
        if name.endswith(FLOAT_WEIGHT)
    }


def starts_at_zero(quantize: Node) -> bool:
    """Return True if no code of a QuantizeLinear stands for a negative value."""
    stored = is_constant(quantize.inputs[1])
    qparams = qparams_of(quantize) if stored else None
    return qparams is not None and qparams.has_zero_point(qparams.quant_min)


def leads_only_to_quantizers(value: Value, *through: str) -> bool:
    """Return True if only QuantizeLinear reads ``value``, also behind the operators ``through``."""
    users = readers(value)
    while (
        len({*users}) == 1
        and users[0].op_type in through
        and not value.is_graph_output()
    ):
        value = users[0].outputs[0]
        users = readers(value)
    only = bool(users) and all(user.op_type == "QuantizeLinear" for user in users)
    return only and not value.is_graph_output()


def stored_weight(value: Value) -> Node | None:
    """Return the DequantizeLinear that computes ``value`` if it reads stored codes."""
    node = computed_by(value, "DequantizeLinear")
    return node if node is not None and is_constant(node.inputs[0]) else None


def is_average(node: Node) -> bool:
    """Return True for a convolution of a file that computes an average over windows."""
    return AVERAGE in str(node.name) and node.op_type == "Conv"


def write_record(model: Model, **entries: object) -> None:
    """Note facts about the file in its metadata; entries with other keys stay."""
    model.metadata_props[_RECORD] = json.dumps({**read_record(model), **entries})


def add_to_record(model: Model, key: str, entries: dict[str, Any]) -> None:
    """Add entries to those that the record has under ``key``."""
    write_record(model, **{key: {**read_record(model).get(key, {}), **entries}})


def read_record(model: Model) -> dict[str, Any]:
    """Return what :func:`write_record` noted; nothing for other files."""
    try:
        record = json.loads(model.metadata_props.get(_RECORD, "{}"))
    except (ValueError, RecursionError):
        record = {}
    return record if isinstance(record, dict) else {}
