"""Stored tensors: what follows from them, the codes of weights, and equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchq.formats import format_by_name
from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    Value,
    add_initializer,
    are_constant,
    input_at,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    opset_of,
    readers,
    remove_unused,
    replace_value,
    serde,
    stored_proto,
    value_of,
)
from torchq.onnx.qdq import (
    add_to_record,
    element_type,
    format_of,
    pair_name,
    qparams_of,
    write_record,
)
from torchq.utils.optional import OptionalModule

_helper: Any = OptionalModule("onnx.helper", "torchq.onnx")
_reference: Any = OptionalModule("onnx.reference", "torchq.onnx")
_passes: Any = OptionalModule("onnx_ir.passes.common", "torchq.onnx")


def lift_constants(model: Model) -> None:
    """Turn Constant nodes into initializers, so that passes see one kind of constant.

    Before: Any graph.
    After: The only Constant nodes are those whose value is an output of the model.
    """
    _passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def fold_slices(model: Model) -> None:
    """Compute slices and copies of stored tensors.

    Before: A bias of packed projections is a Slice of a stored tensor; a parameter with two names
    is an Identity of one.
    After: Both are initializers.
    """
    for node in nodes_of(model, "Slice", "Identity"):
        if not are_constant(node.inputs) or is_output(node.outputs[0]):
            continue
        value = node.inputs[0]
        if node.op_type == "Slice":
            name = node.outputs[0].name
            value = add_initializer(model.graph, name, evaluate(model, node.outputs[0], [node]))
        replace_value(node.outputs[0], value)


def fold_scales(model: Model) -> None:
    """Compute scales and zero points that the exporter left as arithmetic on constants.

    Before: The scale of a large weight is ``amax / 127`` as nodes, because the exporter's optimizer
    stops at a size.
    After: Every scale and zero point that follows from stored tensors is an initializer.
    """
    for node in nodes_of(model, "QuantizeLinear", "DequantizeLinear"):
        for value in node.inputs[1:]:
            if value is None or is_constant(value):
                continue
            found = constant_value(model, value)
            if found is not None:
                name = f"{value.name}/constant"
                replace_value(value, add_initializer(model.graph, name, found))


def constant_value(model: Model, value: Value, depth: int = 16) -> Tensor | None:
    """Return ``value`` if it follows from stored tensors in at most ``depth`` nodes; else None."""
    if is_constant(value):
        return value_of(value)
    nodes: list[Node] = []
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if is_constant(current) and not current.is_graph_input():
            continue
        node = current.producer()
        if node is None or len(nodes) == depth:
            return None
        nodes.append(node)
        new = [v for v in node.inputs if v is not None and v not in seen]
        seen.update(new)
        pending += new
    return evaluate(model, value, nodes)


def evaluate(
    model: Model,
    value: Value,
    nodes: Iterable[Node],
    given: Mapping[Value, Tensor] | None = None,
) -> Tensor:
    """Compute ``value`` with the reference evaluator of ``onnx``.

    ``nodes`` are all between it and stored or ``given`` values, in any order.
    """
    given, nodes = given or {}, list(dict.fromkeys(nodes))
    if len(nodes) > 1:
        chosen = set(nodes)
        nodes = [node for node in model.graph if node in chosen]
    constants = {v for node in nodes for v in node.inputs if is_constant(v) and v not in given}
    graph = _helper.make_graph(
        [*map(serde.serialize_node, nodes)],
        "constants",
        [_helper.make_empty_tensor_value_info(v.name) for v in given],
        [_helper.make_empty_tensor_value_info(value.name)],
        initializer=[*map(stored_proto, constants)],
    )
    imports = [_helper.make_opsetid(d, v) for d, v in model.graph.opset_imports.items()]
    evaluator = _reference.ReferenceEvaluator(_helper.make_model(graph, opset_imports=imports))
    (result,) = evaluator.run(None, {v.name: tensor.numpy() for v, tensor in given.items()})
    # The result may be a number without dimensions, or an expanded view.
    return torch.from_numpy(result.reshape(-1).copy()).reshape(result.shape)


_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FOUR_BITS_SINCE = 21  # The first opset with int4 and uint4.


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
    wanted = format_by_name(node.meta["format"]) if "format" in node.meta else format_of(written)
    narrow = wanted.is_integer and wanted.bits <= 4 and format_of(written).bits == 8
    if not narrow or opset_of(model) < _FOUR_BITS_SINCE:
        return written
    return onnx_ir.DataType.INT4 if format_of(written).quant_min else onnx_ir.DataType.UINT4


def _retype_zero_points(node: Node, dtype: DataType) -> None:
    """Give the readers of the codes a zero point of the type that the codes are stored in."""
    for reader in readers(node.outputs[0]):
        old = input_at(reader, 2)
        if old is not None:
            new = add_initializer(node.graph, str(old.name), value_of(old), dtype)
            reader.replace_input_with(2, new)


#: The comparison keeps a copy of every tensor, so larger ones (in elements) are left alone.
_LARGEST = 2**26


def merge_duplicates(model: Model) -> None:
    """Keep one of equal stored tensors, and one of Q/DQ nodes that do the same to one tensor.

    Before: Each quantizer has a scale, a zero point and a Q/DQ pair of its own.
    After: A tensor is quantized once with one set of parameters. The record has under ``merged``
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
    add_to_record(model, "merged", merged)
