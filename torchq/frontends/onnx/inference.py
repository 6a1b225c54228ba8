"""Shapes and element types of the tensors of a file, before it is converted."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import fx

from torchq.frontends.building import Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.reader import dtype_of
from torchq.utils.optional import import_optional

__all__ = ["infer_types", "note_ndim"]

log = logging.getLogger(__name__)

#: Initializers up to this size take part in shape inference: vectors of sizes, not weights.
_SMALL = 1024
Shapes = dict[str, list[int | None]]

#: Operators whose result has as many dimensions as their first input.
_SAME_NDIM = frozenset(
    {
        "Abs", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv",
        "DequantizeLinear", "Dropout", "Erf", "Exp", "Gelu", "Identity", "LayerNormalization",
        "LeakyRelu", "Log", "MaxPool", "Neg", "Pad", "QuantizeLinear", "Relu", "Resize", "Sigmoid",
        "Slice", "Softmax", "Sqrt", "Tanh", "Tile", "Transpose",
    }
)  # fmt: skip
#: Operators whose result has as many dimensions as the input with the most.
_BROADCAST = frozenset(
    {
        "Add", "Div", "Equal", "Expand", "Greater", "Less", "MatMul", "Max", "Min", "Mul", "PRelu",
        "Pow", "Sub", "Sum", "Where",
    }
)  # fmt: skip


def note_ndim(node: NodeContext, result: Value) -> None:
    """Note how many dimensions a result has where shape inference does not know it."""
    shapes, name = node.builder.shapes, node.output_names[0]
    if name in shapes or not isinstance(result, fx.Node):
        return
    sizes = node.ints(1) if node.op_type == "Reshape" else None
    if sizes is not None:
        shapes[name] = [size if isinstance(size, int) and size > 0 else None for size in sizes]
        return
    ndim = _ndim_of_result(node)
    if ndim is not None:
        shapes[name] = [None] * ndim


def _ndim_of_result(node: NodeContext) -> int | None:
    known = [node.shape(i) for i, value in enumerate(node.inputs) if value is not None]
    ndims = [None if shape is None else len(shape) for shape in known]
    complete = [n for n in ndims if n is not None]
    if not complete or ndims[0] is None:
        return None
    if node.op_type in _SAME_NDIM:
        return ndims[0]
    if node.op_type in ("Unsqueeze", "Squeeze"):
        count = len(node.axes() or ())
        return ndims[0] + count if node.op_type == "Unsqueeze" else ndims[0] - count
    if len(complete) < len(ndims):
        return None
    if node.op_type in _BROADCAST:
        return max(complete)
    return sum(complete) - 1 if node.op_type == "Gather" else None


def infer_types(model: Any, where: str) -> tuple[Shapes, dict[str, torch.dtype | None]]:
    """Infer shapes and element types; what the file stores for inner tensors is not believed.

    Args:
        model: an ``onnx.ModelProto``, left unchanged.
        where: how the log names the file.

    Returns:
        the shapes with None for open sizes, and the dtypes with None where torch has none; both
        only for tensors that are known.
    """
    onnx = import_optional("onnx", "from_onnx")
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.value_info[:], light.graph.initializer[:]
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and tensor.data_location != 1:
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            light.graph.input.append(info)
    for output in light.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    try:
        light = onnx.shape_inference.infer_shapes(light)
    except Exception as error:  # the binding raises several kinds; the rest may still be converted
        log.debug("%s: shapes are not known: %s", where, error)
    shapes: Shapes = {}
    dtypes: dict[str, torch.dtype | None] = {}
    for info in [*light.graph.input, *light.graph.value_info, *light.graph.output]:
        if not info.type.HasField("tensor_type"):
            continue
        kind = info.type.tensor_type
        dtypes[info.name] = dtype_of(kind.elem_type)
        if kind.HasField("shape"):
            sizes = kind.shape.dim
            shapes[info.name] = [d.dim_value if d.HasField("dim_value") else None for d in sizes]
    return shapes, dtypes
