"""The names and notes of nodes: those of quantizers stay, those for debugging go."""

from __future__ import annotations

from torchq.functional.onnx_ops import MARK
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    attribute,
    bypass,
    computed_by,
    fresh_name,
    is_constant,
    is_output,
)
from torchq.onnx.qdq import add_to_record


def name_quantizers(model: Model) -> None:
    """Name each Q/DQ pair after its quantizer, and remove the marks that carried the names.

    Before: The output of each quantizer passes through a mark with its dotted path; the second call
    of one quantizer is marked ``path#2``, and so on.
    After: No mark is left. The nodes of a pair are ``path/QuantizeLinear`` and
    ``path/DequantizeLinear``, their outputs ``path/codes`` and ``path/value``. The record has under
    ``merged`` the quantizers whose pair the exporter had merged with another's. A node's
    ``meta["format"]`` is the name of the format of its quantizer.
    """
    marks = [node for node in model.graph if (node.domain, node.op_type) == MARK]
    merged: dict[str, str] = {}
    named: dict[Node, str] = {}
    for mark in marks:
        pair = _pair_behind(mark.inputs[0])
        if pair is None:
            continue
        name = attribute(mark, "name")
        first = named.setdefault(pair[0], name)
        if first != name:
            merged[name] = first
        else:
            _name_pair(pair, name, attribute(mark, "format"))
    for mark in marks:
        bypass(mark)
    model.graph.opset_imports.pop(MARK[0], None)
    add_to_record(model, "merged", merged)


def _name_pair(pair: tuple[Node, Node], name: str, format: str) -> None:
    """Name the nodes, their outputs and a scale that no other node reads."""
    scale = pair[0].inputs[1]
    if is_constant(scale) and {use.node for use in scale.uses()} == {*pair}:
        scale.name = fresh_name(pair[0].graph, f"{name}/scale")
    for node, role in zip(pair, ("codes", "value"), strict=True):
        node.name = f"{name}/{node.op_type}"
        node.meta["format"] = format
        if not is_output(node.outputs[0]):
            node.outputs[0].name = fresh_name(node.graph, f"{name}/{role}")


def _pair_behind(value: Value) -> tuple[Node, Node] | None:
    """Return the Q/DQ pair that computes ``value``, through a Cast; None where there is none."""
    cast = computed_by(value, "Cast")
    dequantize = computed_by(value if cast is None else cast.inputs[0], "DequantizeLinear")
    quantize = computed_by(dequantize.inputs[0], "QuantizeLinear") if dequantize else None
    return (quantize, dequantize) if quantize is not None else None


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
        for key in [key for key in node.metadata_props if not key.endswith(_MODULE_NAMES)]:
            del node.metadata_props[key]
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
