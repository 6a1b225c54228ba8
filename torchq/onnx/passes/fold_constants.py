"""Computing what follows from stored tensors alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    replace_value,
    value_of,
)
from torchq.utils.optional import OptionalModule

__all__ = ["constant_value", "evaluate", "fold_scales", "fold_slices", "lift_constants"]

_helper: Any = OptionalModule("onnx.helper", "torchq.onnx")
_reference: Any = OptionalModule("onnx.reference", "torchq.onnx")
_passes: Any = OptionalModule("onnx_ir.passes.common", "torchq.onnx")


def lift_constants(model: Model) -> None:
    """Turn Constant nodes into initializers, so that passes see one kind of constant.

    Before::

        Any graph.

    After::

        The only Constant nodes are those whose value is an output of the model.
    """
    _passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def fold_slices(model: Model) -> None:
    """Compute slices and copies of stored tensors.

    Before::

        A bias of packed projections is a Slice of a stored tensor; a parameter with two names
        is an Identity of one.

    After::

        Both are initializers.
    """
    for node in nodes_of(model, "Slice", "Identity"):
        if not all(is_constant(v) for v in node.inputs if v) or is_output(node.outputs[0]):
            continue
        value = node.inputs[0]
        if node.op_type == "Slice":
            name = node.outputs[0].name
            value = add_initializer(model.graph, name, evaluate(model, node.outputs[0], [node]))
        replace_value(node.outputs[0], value)


def fold_scales(model: Model) -> None:
    """Compute scales and zero points that the exporter left as arithmetic on constants.

    Before::

        The scale of a large weight is ``amax / 127`` as nodes, because the exporter's
        optimizer stops at a size.

    After::

        Every scale and zero point that follows from stored tensors is an initializer.
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

    Args:
        model: The model that the nodes are part of.
        value: The result.
        nodes: All nodes between ``value`` and stored tensors, in any order.
        given: Values to use in place of computed ones.
    """
    given, nodes = given or {}, list(dict.fromkeys(nodes))
    if len(nodes) > 1:
        chosen = set(nodes)
        nodes = [node for node in model.graph if node in chosen]
    constants = {v for node in nodes for v in node.inputs if is_constant(v) and v not in given}
    graph = _helper.make_graph(
        [onnx_ir.to_proto(node) for node in nodes],
        "constants",
        [_helper.make_empty_tensor_value_info(v.name) for v in given],
        [_helper.make_empty_tensor_value_info(value.name)],
        initializer=[_as_proto(v) for v in constants],
    )
    imports = [_helper.make_opsetid(d, v) for d, v in model.graph.opset_imports.items()]
    evaluator = _reference.ReferenceEvaluator(_helper.make_model(graph, opset_imports=imports))
    (result,) = evaluator.run(None, {v.name: tensor.numpy() for v, tensor in given.items()})
    # The result may be a number without dimensions, or an expanded view.
    return torch.from_numpy(result.reshape(-1).copy()).reshape(result.shape)


def _as_proto(value: Value) -> Any:
    proto = onnx_ir.to_proto(value.const_value)
    proto.name = value.name
    return proto
