"""What is known about shapes before a file runs, and arithmetic on them that needs no runtime."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchq.onnx.ir import Graph
from torchq.onnx.passes.cleanup import attribute, evaluate
from torchq.utils.optional import need

__all__ = ["Shape", "fold_shapes", "known_shapes"]

#: The length of each dimension; a name, or None, where it is only known once the file runs.
Shape = tuple[int | str | None, ...]
_SMALL = 64  # elements; shapes, indexes and factors, no weights
_ARITHMETIC = frozenset(
    [
        "Cast",
        "Sqrt",
        "Div",
        "Mul",
        "Add",
        "Sub",
        "Mod",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Concat",
        "Slice",
        "Gather",
        "Pow",
        "Reciprocal",
    ]
)
_NUMERIC = frozenset([1, 6, 7, 9, 11])  # float32, int32, int64, bool, float64


def known_shapes(graph: Graph) -> dict[str, Shape]:
    """The shapes that follow from those of inputs and initializers, by value."""
    onnx = need("onnx", "torchq.onnx")
    slim = onnx.ModelProto(
        ir_version=graph.model.ir_version,
        opset_import=graph.model.opset_import,
        functions=graph.model.functions,
    )
    slim.graph.name = "shapes"
    slim.graph.node.extend(graph.proto.node)
    for output in (
        graph.proto.output
    ):  # without the shape that is noted there: the TorchScript exporter takes the example's
        slim.graph.output.append(
            onnx.helper.make_tensor_value_info(output.name, output.type.tensor_type.elem_type, None)
        )
    slim.graph.input.extend(graph.proto.input)
    for name, tensor in graph.initializers.items():
        if math.prod(tensor.dims) <= _SMALL:
            slim.graph.initializer.append(tensor)
        elif name not in graph.inputs:
            slim.graph.input.append(
                onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            )
    found = onnx.shape_inference.infer_shapes(slim, data_prop=True).graph
    typed = [
        value
        for value in (*found.input, *found.value_info, *found.output)
        if value.type.tensor_type.HasField("shape")
    ]
    stored = {name: tuple(tensor.dims) for name, tensor in graph.initializers.items()}
    names = {
        dim.dim_param for value in slim.graph.input for dim in value.type.tensor_type.shape.dim
    }  # inference makes up others
    return stored | {
        value.name: tuple(_length(dim, names) for dim in value.type.tensor_type.shape.dim)
        for value in typed
    }


def _length(dim: Any, names: set[str]) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) if dim.dim_param and dim.dim_param in names else None


def fold_shapes(graph: Graph) -> None:
    """Compute what follows from known lengths: the scale of attention, the shapes that tensors are brought into.

    A reshape with one length unknown takes what is left for it, so a dynamic batch stays dynamic.
    """
    _fold_once(graph, {})  # inference follows no arithmetic on indexes
    while _fold_once(graph, known_shapes(graph)):
        pass


def _fold_once(graph: Graph, shapes: dict[str, Shape]) -> bool:
    """Whether anything was known."""
    before = len(graph.initializers)
    for node in graph.nodes:
        if node.op_type == "Reshape" and node.input[1] not in graph.initializers:
            _reshape_to_known(graph, node, shapes)
        if len(node.output) != 1 or graph.is_output(node.output[0]):
            continue
        if (value := _from_shape(graph, node, shapes)) is None and _is_small_arithmetic(
            graph, node
        ):
            value = evaluate(graph, node.output[0], [node], {*node.input})
        if value is not None:
            graph.replace_uses(node.output[0], graph.add_initializer(node.output[0], value))
    found = len(graph.initializers) > before
    graph.reindex()
    graph.prune()
    return found


def _is_small_arithmetic(graph: Graph, node: Any) -> bool:
    tensors = [graph.initializers.get(name) for name in node.input if name]
    stays_numeric = node.op_type in _ARITHMETIC and (
        node.op_type != "Cast" or attribute(node, "to") in _NUMERIC
    )
    return stays_numeric and all(
        tensor is not None and tensor.data_type in _NUMERIC and math.prod(tensor.dims) <= _SMALL
        for tensor in tensors
    )


def _from_shape(graph: Graph, node: Any, shapes: dict[str, Shape]) -> Tensor | None:
    """The value of a Shape, or of what picks lengths out of one, where these lengths are known."""
    picks = node.op_type in ("Gather", "Slice") and all(
        name in graph.initializers for name in node.input[1:] if name
    )
    source = graph.producer(node.input[0]) if picks else node if node.op_type == "Shape" else None
    if (
        source is None
        or source.op_type != "Shape"
        or source.attribute
        or source.input[0] not in shapes
    ):
        return None
    lengths = torch.tensor(
        [length if isinstance(length, int) else -1 for length in shapes[source.input[0]]],
        dtype=torch.int64,
    )
    if picks:
        lengths = evaluate(graph, node.output[0], [node], {*node.input}, {node.input[0]: lengths})
    return None if bool((lengths < 0).any()) else lengths


def _reshape_to_known(graph: Graph, node: Any, shapes: dict[str, Shape]) -> None:
    """Store the shape that a tensor is brought into, where it has one open length at most."""
    before, after = shapes.get(node.input[0], ()), shapes.get(node.output[0])
    if after is None or 0 in after:
        return
    if (missing := _what_is_left(before, after)) is not None:
        after = tuple(missing if length is None else length for length in after)
    if sum(not isinstance(length, int) for length in after) > 1:
        return
    # 0 takes the length over, which keeps its name for those who infer shapes; -1 takes what is left.
    takes_over = not attribute(node, "allowzero", 0)
    kept = [
        takes_over and isinstance(length, str) and before[i : i + 1] == (length,)
        for i, length in enumerate(after)
    ]
    lengths = [
        length if isinstance(length, int) else 0 if same else -1
        for length, same in zip(after, kept, strict=True)
    ]
    node.input[1] = graph.add_initializer(
        f"{node.output[0]}/shape", torch.tensor(lengths, dtype=torch.int64)
    )


def _what_is_left(before: Shape, after: Shape) -> int | None:
    """The one unknown length after a reshape, where the open lengths before and after are the same by name."""
    if None in before or after.count(None) != 1 or _names(before) != _names(after):
        return None
    whole, part = (
        math.prod(length for length in shape if isinstance(length, int))
        for shape in (before, after)
    )
    return whole // part


def _names(shape: Shape) -> list[str]:
    return sorted(length for length in shape if isinstance(length, str))
