"""Shapes and element types of the tensors of a file, and freeing the batch that it fixes."""

import logging
import math
from typing import Any

import torch

from torchq.errors import FrontendError
from torchq.frontends.onnx.reader import dtype_of, graphs
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)

#: Initializers up to this size take part in shape inference: vectors of sizes, not weights.
_SMALL = 1024
Sizes = list["int | str | None"]


def infer_types(
    model: object, where: str
) -> tuple[dict[str, Sizes], dict[str, torch.dtype | None]]:
    """Infer shapes, with the names of open sizes, and element types, as far as they are known."""
    light = _light_copy(model)
    try:
        onnx = import_optional("onnx", "from_onnx")
        light = onnx.shape_inference.infer_shapes(light)
        while _note_ranks(light.graph, where):
            light = onnx.shape_inference.infer_shapes(light)
    # The binding raises several kinds; the rest may still be converted.
    except Exception as error:
        log.debug("%s: shapes are not known: %s", where, error)
    inner = [
        value_info
        for graph in graphs(light.graph, where)
        for value_info in graph.value_info
    ]
    bodies = [
        value_info
        for graph in graphs(light.graph, where)
        for value_info in (*graph.input, *graph.output)
        if graph is not light.graph
    ]
    infos = [*light.graph.input, *inner, *light.graph.output]
    # A name that a body shares with what is outside of it says nothing.
    outside = {info.name for info in infos}
    shared = outside.intersection(info.name for info in bodies)
    infos = [info for info in (*bodies, *infos) if info.name not in shared]
    types = {
        i.name: i.type.tensor_type for i in infos if i.type.HasField("tensor_type")
    }
    shapes: dict[str, Sizes] = {}
    for name, kind in types.items():
        if kind.HasField("shape"):
            sizes = kind.shape.dim
            shapes[name] = [
                d.dim_value if d.HasField("dim_value") else d.dim_param or None
                for d in sizes
            ]
    return shapes, {name: dtype_of(kind.elem_type) for name, kind in types.items()}


def infer_value_types(model: Any) -> dict[str, bytes]:
    """Return the serialized types of the tensors of the outermost graph, as far as known."""
    onnx = import_optional("onnx", "from_onnx")
    light = onnx.shape_inference.infer_shapes(_light_copy(model)).graph
    known = {
        tensor.name: onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        for tensor in light.initializer
    }
    infos = (*light.input, *light.value_info, *light.output)
    known |= {info.name: info.type for info in infos}
    return {name: kind.SerializeToString() for name, kind in known.items()}


def _note_ranks(graph: Any, where: str) -> bool:
    """Note how many sizes results of Reshape have where inference knows none; return True if new.

    A target that is computed from sizes, with a constant beside them, is unknown to inference; its
    length is known, and what follows can be inferred from that.
    """
    is_new = False
    for inner in graphs(graph, where):
        known = {v.name: v for v in (*inner.input, *inner.value_info, *inner.output)}
        lengths = {tensor.name: list(tensor.dims) for tensor in inner.initializer}
        for name, value in known.items():
            kind = value.type.tensor_type
            if kind.HasField("shape"):
                lengths[name] = [d.dim_value for d in kind.shape.dim]
        for node in inner.node:
            result = known.get(node.output[0]) if node.op_type == "Reshape" else None
            length = lengths.get(node.input[1], [0]) if result is not None else [0]
            if result is None or node.output[0] in lengths or not any(length):
                continue
            for _ in range(length[0]):
                result.type.tensor_type.shape.dim.add()
            is_new = True
    return is_new


def _light_copy(model: Any) -> Any:
    """Return a model without large tensors, and without what it says of inner tensors."""
    onnx = import_optional("onnx", "from_onnx")
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.value_info[:], light.graph.initializer[:]
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and tensor.data_location != 1:
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            value_info = onnx.helper.make_tensor_value_info(
                tensor.name, tensor.data_type, tensor.dims
            )
            light.graph.input.append(value_info)
    for output in light.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    for value in light.graph.input:
        for size in value.type.tensor_type.shape.dim:
            # Old exporters of PaddlePaddle write open sizes as -1.
            if size.dim_value < 0:
                size.ClearField("dim_value")
    return light


# --- freeing the batch, in inputs and in the reshapes that repeat it ----------------------------

#: The name of the freed size while shapes are inferred.
_BATCH = "torchq_batch"
#: Operators that may take a part of the batch without a trace in the inferred shapes.
_CUTTING = frozenset(["Slice", "Split", "Gather", "Resize", "Upsample"])
#: Operators whose results are sizes or places.
_PLACES = frozenset(["Shape", "Size", "NonZero", "NonMaxSuppression"])


def free_batch_(model: Any, where: str) -> None:
    """Leave the first size of inputs open, in place; Reshapes to it copy it from their input."""
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    firsts = [value.type.tensor_type.shape.dim[:1] for value in inputs]
    batch = firsts[0][0].dim_value if firsts and firsts[0] else 0
    if batch < 1:
        return  # it is open
    for first in firsts:
        if first and first[0].dim_value == batch:
            first[0].dim_param = _BATCH
    constants = _constants(graph)
    shapes = infer_types(model, where)[0]
    while sum(
        _free_reshape(graph, node, shapes, constants, batch) for node in graph.node
    ):
        shapes = infer_types(model, where)[0]
    fixed = _fixed(graph, shapes)
    for number, node in enumerate(graph.node):
        if _keeps_batch(node, shapes, constants, fixed):
            continue
        raise FrontendError(
            f"{where}: {node.op_type} {node.name or f'{node.op_type}_{number}'!r} computes with "
            f"the batch of {batch} that the file fixes; expected one that takes any batch. Leave "
            "free_batch out, or export the file again with an open batch"
        )


def _constants(graph: Any) -> dict[str, list[int]]:
    """Return the whole numbers that are stored in the file, by name."""
    onnx = import_optional("onnx", "from_onnx")
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            initializers[node.output[0]] = node.attribute[0].t
    small = {
        name: tensor
        for name, tensor in initializers.items()
        if tensor.data_type == onnx.TensorProto.INT64
        and tensor.data_location != onnx.TensorProto.EXTERNAL
        and len(tensor.dims) == 1
        and tensor.dims[0] < 32
    }
    return {
        name: onnx.numpy_helper.to_array(tensor).tolist()
        for name, tensor in small.items()
    }


def _free_reshape(
    graph: Any,
    node: Any,
    shapes: dict[str, Sizes],
    constants: dict[str, list[int]],
    batch: int,
) -> bool:
    """Let a Reshape copy the batch from its input, if it repeats it; return True if it did."""
    if node.op_type != "Reshape":
        return False
    source = shapes.get(node.input[0], [])
    target = constants.get(node.input[1], [])
    axis = _place_of_batch(source, target)
    if axis is None or target[axis] != batch:
        return False
    changed = [*target[:axis], 0, *target[axis + 1 :]]
    onnx = import_optional("onnx", "from_onnx")
    name = f"{node.output[0]}_with_any_batch"
    graph.initializer.append(onnx.helper.make_tensor(name, 7, [len(changed)], changed))
    node.input[1], constants[name] = name, changed
    return True


def _place_of_batch(source: Sizes, target: list[int]) -> int | None:
    """Return where a Reshape has the batch of its input if it copies the sizes before it."""
    axis = source.index(_BATCH) if _BATCH in source else len(target)
    before = [
        kept_size == 0 or kept_size == size
        for kept_size, size in zip(target, source[:axis], strict=False)
    ]
    return axis if len(target) > axis and all(before) else None


def _fixed(graph: Any, shapes: dict[str, Sizes]) -> set[str]:
    """Return the tensors that do not depend on the inputs whose batch was freed."""
    without_batch = {""} | {tensor.name for tensor in graph.initializer}
    without_batch |= {
        v.name for v in graph.input if _BATCH not in shapes.get(v.name, [_BATCH])
    }
    for node in graph.node:
        if all(name in without_batch for name in node.input):
            without_batch.update(node.output)
    return without_batch


def _keeps_batch(
    node: Any,
    shapes: dict[str, Sizes],
    constants: dict[str, list[int]],
    fixed: set[str],
) -> bool:
    """Return False if a node may compute another thing with another batch."""
    if node.op_type in _PLACES or all(name in fixed for name in node.input):
        return True
    if any(attribute.type == attribute.GRAPH for attribute in node.attribute):
        return False
    source = shapes.get(node.input[0])
    if node.op_type == "Reshape":
        return _reshape_keeps_batch(source, constants.get(node.input[1]))
    results = [shapes.get(name) for name in node.output if name]
    if node.op_type == "Squeeze" and None in results:
        return False
    if not any(_BATCH in shapes.get(name, []) for name in node.input):
        return True
    return any(
        result is None
        or _BATCH in result
        or (None in result and node.op_type not in _CUTTING)
        for result in results
    )


def _reshape_keeps_batch(source: Sizes | None, target: list[int] | None) -> bool:
    """Return True if a Reshape to a constant shape leaves the place of the batch open."""
    if target is None:
        return True  # computed from sizes, which are open
    if source is None or _BATCH not in source:
        is_known = source is not None and None not in source
        return is_known or target[:1] == [-1]
    axis = _place_of_batch(source, target)
    return axis is not None and target[axis] in (0, -1)
