"""Passes over a freshly exported graph: names, integer weights, no duplicates, no machine paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchq.formats import Format, by_name
from torchq.functional.onnx_ops import MARK
from torchq.onnx.ir import DTYPES, FLOAT_TYPES, Graph
from torchq.utils.optional import need

__all__ = [
    "FORMATS",
    "TRANSPOSED",
    "attribute",
    "axis_of",
    "constants_to_initializers",
    "element_type",
    "evaluate",
    "fold_constants",
    "fold_scales",
    "fold_slices",
    "fold_weights",
    "merge_duplicates",
    "name_quantizers",
    "strip_metadata",
]

#: Formats of the element types that QuantizeLinear writes.
FORMATS: dict[int, Format] = {
    2: by_name("uint8"),
    3: by_name("int8"),
    4: by_name("uint16"),
    5: by_name("int16"),
    17: by_name("e4m3"),
    19: by_name("e5m2"),
    21: by_name("uint4"),
    22: by_name("int4"),
}
#: Ends the names of weights that are stored transposed.
TRANSPOSED = "/weight.T"
_FLOAT8 = {17: torch.float8_e4m3fn, 19: torch.float8_e5m2}


def attribute(node: Any, name: str, default: Any = None) -> Any:
    """The value of an attribute of ``node``."""
    found = next((a for a in node.attribute if a.name == name), None)
    return (
        default if found is None else need("onnx.helper", "torchq.onnx").get_attribute_value(found)
    )


def axis_of(node: Any) -> int:
    """The axis of a QuantizeLinear or DequantizeLinear."""
    return int(attribute(node, "axis", 1))


def constants_to_initializers(graph: Graph) -> None:
    """Constant nodes become initializers, so that passes see one kind of constant."""
    done = []
    for node in graph.of("Constant"):
        tensor = attribute(node, "value")
        if tensor is not None and not graph.is_output(node.output[0]):
            tensor.name = node.output[0]
            graph.proto.initializer.append(tensor)
            graph.initializers[tensor.name] = graph.proto.initializer[-1]
            done.append(node)
    graph.remove(done)


def name_quantizers(graph: Graph) -> tuple[list[str], dict[str, str]]:
    """Take out the marks; give each QuantizeLinear, its DequantizeLinear and their values the path of its quantizer.

    A quantizer that is called again is marked ``path#2`` and so on.

    Returns:
        the names in order of the graph; and those whose nodes the exporter had merged with another's: name -> name in the graph.
    """
    marks = [node for node in graph.nodes if (node.domain, node.op_type) == MARK]
    names: list[str] = []
    merged: dict[str, str] = {}
    named: dict[int, str] = {}
    for mark in marks:
        name = attribute(mark, "name").decode()
        if (pair := _pair_behind(graph, mark.input[0])) is not None:
            names.append(name)
            if (first := named.setdefault(id(pair[0]), name)) != name:
                merged[name] = first
                continue
            _rename_scale(graph, pair, name)
            for node, role in zip(pair, ("codes", "value"), strict=True):
                node.name = f"{name}/{node.op_type}"
                if not graph.is_output(node.output[0]):
                    graph.rename(node.output[0], f"{name}/{role}")
    for mark in marks:
        graph.bypass(mark)
    graph.remove(marks)
    for index in reversed(range(len(graph.model.opset_import))):
        if graph.model.opset_import[index].domain == MARK[0]:
            del graph.model.opset_import[index]
    return names, merged


def _rename_scale(graph: Graph, pair: tuple[Any, Any], name: str) -> None:
    scale = pair[0].input[1]
    if {id(reader) for reader in graph.readers(scale)} == {
        id(node) for node in pair
    } and scale in graph.initializers:
        graph.rename_initializer(scale, graph.fresh(f"{name}/scale"))


def _pair_behind(graph: Graph, value: str) -> tuple[Any, Any] | None:
    """The QuantizeLinear and DequantizeLinear that ``value`` comes from, through a Cast; None where the quantizer passed its input on."""
    node = graph.producer(value)
    if node is not None and node.op_type == "Cast":
        node = graph.producer(node.input[0])
    if node is None or node.op_type != "DequantizeLinear":
        return None
    quantize = graph.producer(node.input[0])
    return None if quantize is None or quantize.op_type != "QuantizeLinear" else (quantize, node)


def fold_constants(graph: Graph, name: str, depth: int = 16) -> Tensor | None:
    """The value of ``name`` where it follows from initializers alone (clips, casts and reshapes of a weight); else None."""
    if name in graph.initializers:
        return graph.value(name)
    nodes: list[Any] = []
    pending, seen = [name], {name}
    while pending:
        current = pending.pop()
        if current in graph.initializers:
            continue
        node = graph.producer(current)
        if node is None or len(nodes) == depth or current in graph.inputs:
            return None
        nodes.append(node)
        new = [source for source in node.input if source and source not in seen]
        seen.update(new)
        pending += new
    return evaluate(graph, name, nodes, seen)


def evaluate(
    graph: Graph,
    name: str,
    nodes: list[Any],
    names: set[str],
    given: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The value of ``name`` from a few nodes, with the reference evaluator of onnx.

    Args:
        nodes: in any order; all that lie between ``name`` and the initializers.
        names: the values that they read.
        given: values to take in place of computed ones.
    """
    helper = need("onnx.helper", "torchq.onnx")
    chosen = {id(node) for node in nodes}
    values = [graph.initializers[n] for n in names if n in graph.initializers]
    feeds = {n: value.numpy() for n, value in (given or {}).items()}
    ordered = nodes if len(nodes) == 1 else [node for node in graph.nodes if id(node) in chosen]
    info, inputs = (
        [helper.make_empty_tensor_value_info(name)],
        [helper.make_empty_tensor_value_info(n) for n in feeds],
    )
    model = helper.make_model(
        helper.make_graph(ordered, "constants", inputs, info, initializer=values),
        opset_imports=list(graph.model.opset_import),
    )
    (result,) = need("onnx.reference", "torchq.onnx").ReferenceEvaluator(model).run(None, feeds)
    # It may be a number without dimensions, or expanded.
    return (
        torch.from_numpy(result.reshape(-1).copy())
        .clone(memory_format=torch.contiguous_format)
        .reshape(result.shape)
    )


def fold_slices(graph: Graph) -> None:
    """Compute slices and copies of initializers: biases of packed projections, parameters with two names."""
    for node in graph.of("Slice", "Identity"):
        if all(name in graph.initializers for name in node.input) and not graph.is_output(
            node.output[0]
        ):
            value = node.input[0]
            if node.op_type == "Slice":
                value = graph.add_initializer(
                    node.output[0], evaluate(graph, node.output[0], [node], {*node.input})
                )
            graph.replace_uses(node.output[0], value)
    graph.prune()


def fold_scales(graph: Graph) -> None:
    """Compute scales and zero points that the exporter left as arithmetic on constants: its optimiser stops at a size."""
    for node in graph.of("QuantizeLinear", "DequantizeLinear"):
        for name in node.input[1:]:
            if (
                name
                and name not in graph.initializers
                and (value := fold_constants(graph, name)) is not None
            ):
                graph.replace_uses(name, graph.add_initializer(f"{name}/constant", value))
    graph.prune()


def fold_weights(graph: Graph, formats: Mapping[str, Format]) -> list[str]:
    """Replace each QuantizeLinear of a constant by its codes, stored in the type that it writes.

    Args:
        formats: the format of each quantizer by name, where it is narrower than its ONNX type: the TorchScript exporter writes int8
            for int4. From opset 21 the codes are stored in that narrower type then.

    Returns:
        the names of the quantizers whose weights are folded.
    """
    done, names = [], []
    for node in graph.of("QuantizeLinear"):
        weight = fold_constants(graph, node.input[0])
        if weight is None or any(name not in graph.initializers for name in node.input[1:]):
            continue
        name = node.name.removesuffix("/QuantizeLinear")
        kind = element_type(graph, node)
        codes = _codes(
            weight,
            graph.value(node.input[1]),
            axis_of(node),
            attribute(node, "block_size", 0),
            FORMATS[kind],
        )
        wanted = formats.get(name.partition("#")[0])
        if (
            wanted is not None
            and graph.opset >= 21
            and FORMATS[kind].bits == 8
            and wanted.is_integer
            and wanted.bits <= 4
        ):
            kind = 22 if FORMATS[kind].signed else 21
            _retype_zero_points(graph, node, kind)
        stored = codes.to(
            _FLOAT8.get(kind) or DTYPES.get(kind) or (torch.uint8 if kind == 21 else torch.int8)
        )
        graph.replace_uses(node.output[0], graph.add_initializer(f"{name}/weight", stored, kind))
        done.append(node)
        names.append(name)
    graph.remove(done)
    return names


def element_type(graph: Graph, node: Any) -> int:
    """The type that a QuantizeLinear writes."""
    if len(node.input) > 2 and node.input[2]:
        return int(graph.initializers[node.input[2]].data_type)
    return int(attribute(node, "output_dtype", 2))


def _retype_zero_points(graph: Graph, node: Any, kind: int) -> None:
    """The readers of a folded weight get a zero point of the type that it is stored in."""
    for reader in graph.readers(node.output[0]):
        if len(reader.input) > 2 and reader.input[2]:
            zero = graph.value(reader.input[2])
            reader.input[2] = graph.add_initializer(reader.input[2], zero, kind)


def _codes(weight: Tensor, scale: Tensor, axis: int, block: int, format: Format) -> Tensor:
    """``snap(weight / scale)``: the same arithmetic as :mod:`torchq.functional.fake_quant`."""
    weight = weight.to(torch.float32)
    if block:
        scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, weight.shape[axis])
    elif scale.dim():
        scale = scale.reshape([-1 if d == axis % weight.dim() else 1 for d in range(weight.dim())])
    return format.snap_(weight / scale)


def merge_duplicates(graph: Graph) -> dict[str, str]:
    """Keep one of equal initializers, and one of Q/DQ nodes that do the same to the same tensor.

    Returns:
        name of each quantizer that went -> name of the one that does its work.
    """
    kept: dict[Any, str] = {}
    for name, tensor in graph.initializers.items():
        if tensor.data_type in FLOAT_TYPES and len(tensor.raw_data) > 4096:
            continue  # weights that are shared are one initializer already
        key = (
            tensor.data_type,
            tuple(tensor.dims),
            graph.value(name).view(-1).contiguous().view(torch.uint8).numpy().tobytes(),
        )
        if (first := kept.setdefault(key, name)) != name:
            graph.replace_uses(name, first)
    merged: dict[str, str] = {}
    gone: list[Any] = []
    seen: dict[Any, Any] = {}
    for node in graph.of("QuantizeLinear", "DequantizeLinear"):
        settings = tuple(sorted(a.SerializeToString() for a in node.attribute))
        first = seen.setdefault((node.op_type, tuple(node.input), settings), node)
        if first is not node and not graph.is_output(node.output[0]):
            graph.replace_uses(node.output[0], first.output[0])
            gone.append(node)
            merged[node.name.rpartition("/")[0]] = first.name.rpartition("/")[0]
    graph.remove(gone)
    graph.prune()
    return merged


def strip_metadata(graph: Graph) -> None:
    """Drop what the exporter notes for its own debugging: stack traces hold paths of the machine and are most of a small file."""
    for node in graph.nodes:
        keep = [(p.key, p.value) for p in node.metadata_props if p.key.endswith("name_scopes")]
        del node.metadata_props[:]
        for key, value in keep:
            node.metadata_props.add(key=key, value=value)
        node.ClearField("doc_string")
    del graph.proto.metadata_props[:]
