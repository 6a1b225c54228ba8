"""Shapes and element types of the tensors of a file, before and while it is converted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchq.frontends.building.graph import Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.reader import dtype_of
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)

#: Initializers up to this size take part in shape inference: vectors of sizes, not weights.
_SMALL = 1024
Shapes = dict[str, list[int | None]]

#: Operators whose results have as many dimensions as their first input.
_SAME_NDIM = frozenset(
    {
        "Abs", "Attention", "AveragePool", "BatchNormalization", "BiasGelu", "BitwiseNot", "Cast",
        "Ceil", "Clip", "Concat", "Conv", "CumSum", "DequantizeLinear", "Dropout", "Elu", "Erf",
        "Exp", "FastGelu", "Floor", "FusedConv", "FusedGemm", "GatherElements", "Gelu",
        "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity",
        "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax",
        "MaxPool", "MultiHeadAttention", "Neg", "Not", "Pad", "QuantizeLinear", "QuickGelu",
        "Reciprocal", "Relu", "Resize", "Round", "Scatter", "ScatterElements", "ScatterND",
        "Sigmoid", "Sign", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Slice",
        "Softmax", "Softplus", "Split", "Sqrt", "Tanh", "Tile", "TopK", "Transpose", "Trilu",
        "Upsample",
    }
)  # fmt: skip
#: Operators whose result has as many dimensions as the input with the most.
_BROADCAST = frozenset(
    {
        "Add", "And", "Div", "Equal", "Expand", "FusedMatMul", "Greater", "GreaterOrEqual",
        "Less", "LessOrEqual", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow",
        "Sub", "Sum", "Where", "Xor",
    }
)  # fmt: skip
#: Operators whose result has an element type of its own.
_FLAGS = frozenset(
    {
        "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not",
        "Or", "Xor",
    }
)  # fmt: skip
_PLACES = frozenset(
    {"ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "Shape", "Size", "Unique"}
)  # fmt: skip
#: Operators whose result has a fixed number of dimensions.
_FIXED_NDIM = {
    "EmbedLayerNormalization": 3,
    "Flatten": 2,
    "NonMaxSuppression": 2,
    "NonZero": 2,
    "Range": 1,
    "RoiAlign": 4,
}


def note_types(node: NodeContext, results: Sequence[Value]) -> None:
    """Note dimensions and element types of results that shape inference does not know.

    It knows nothing of operators of other domains, nor of what is computed from their results.
    """
    dtypes = node.builder.dtypes
    for index, name in enumerate(node.output_names):
        if name and name not in dtypes:
            found = _dtype_of_result(node, index)
            if found is not None:
                dtypes[name] = found
    _note_ndims(node, results)


def _dtype_of_result(node: NodeContext, index: int) -> torch.dtype | None:
    if node.op_type in _FLAGS:
        return torch.bool
    if node.op_type in _PLACES or (node.op_type == "TopK" and index == 1):
        return torch.int64
    if node.op_type in ("Cast", "CastLike", "QuantizeLinear", "If") or not node.inputs:
        return dtype_of(node.attr("to", 0)) if node.op_type == "Cast" else None
    source = {"Where": 1, "OneHot": 2, "EmbedLayerNormalization": 2}.get(node.op_type, 0)
    return node.dtype(source) if node.input(source) is not None else None


def _note_ndims(node: NodeContext, results: Sequence[Value]) -> None:
    shapes = node.builder.shapes
    for name, result in zip(node.output_names, results, strict=False):
        if not name or name in shapes or not isinstance(result, fx.Node):
            continue
        sizes = node.ints(1) if node.op_type == "Reshape" else None
        if sizes is not None:
            shapes[name] = [size if isinstance(size, int) and size > 0 else None for size in sizes]
            continue
        ndim = _ndim_of_result(node)
        if ndim is not None:
            shapes[name] = [None] * ndim


def _ndim_of_result(node: NodeContext) -> int | None:
    if node.op_type in _FIXED_NDIM:
        return _FIXED_NDIM[node.op_type]
    known = [node.shape(i) for i, value in enumerate(node.inputs) if value is not None]
    ndims = [None if shape is None else len(shape) for shape in known]
    complete = [n for n in ndims if n is not None]
    if node.op_type == "Concat" and complete:
        return complete[0]
    if node.op_type == "Expand" and known[-1] and isinstance(known[-1][0], int):
        ndims[-1] = known[-1][0]  # the second input holds the sizes
        complete = [n for n in ndims if n is not None]
    if not complete or ndims[0] is None:
        return None
    if node.op_type in _SAME_NDIM:
        return ndims[0]
    if node.op_type.startswith(("Reduce", "Arg")):
        return _ndim_of_reduction(node, ndims[0])
    if node.op_type in ("Unsqueeze", "Squeeze"):
        axes = node.axes()
        if axes is None:
            return None
        return ndims[0] + len(axes) if node.op_type == "Unsqueeze" else ndims[0] - len(axes)
    if len(complete) < len(ndims):
        return None
    if node.op_type in _BROADCAST:
        return max(complete)
    if node.op_type == "GatherND" and known[1] and isinstance(known[1][-1], int):
        return sum(complete) - known[1][-1] - 1 - int(node.attr("batch_dims", 0))
    return sum(complete) - 1 if node.op_type == "Gather" else None


def _ndim_of_reduction(node: NodeContext, ndim: int) -> int | None:
    if node.attr("keepdims", 1):
        return ndim
    if node.op_type.startswith("Arg"):
        return ndim - 1
    if node.input(1) is not None and node.constant(1) is None:
        return None
    axes = node.axes()
    return ndim - len(axes) if axes else 0


def _inferred(graph: Any) -> Iterator[Any]:
    """Yield what shape inference noted of the tensors inside a graph and its sub-graphs."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from _inferred(attribute.g)
    yield from graph.value_info


def infer_types(model: Any, where: str) -> tuple[Shapes, dict[str, torch.dtype | None]]:
    """Infer shapes and element types; what the file stores for inner tensors is not believed."""
    known = _infer(model, where)
    shapes = {
        name: [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        for name, kind in known.items()
        if kind.HasField("shape")
    }
    return shapes, {name: dtype_of(kind.elem_type) for name, kind in known.items()}


def infer_shapes(model: Any, where: str) -> dict[str, list[int | str | None]]:
    """Infer shapes with the names of open sizes; None for a size without a name."""
    known = _infer(model, where)
    return {
        name: [
            d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim
        ]
        for name, kind in known.items()
        if kind.HasField("shape")
    }


def _infer(model: Any, where: str) -> dict[str, Any]:
    """Return the types of tensors, by name, as far as they are known."""
    light = _light_copy(model)
    try:
        onnx = import_optional("onnx", "from_onnx")
        light = onnx.shape_inference.infer_shapes(light)
    except Exception as error:  # the binding raises several kinds; the rest may still be converted
        log.debug("%s: shapes are not known: %s", where, error)
    infos = [*light.graph.input, *_inferred(light.graph), *light.graph.output]
    return {i.name: i.type.tensor_type for i in infos if i.type.HasField("tensor_type")}


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
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            light.graph.input.append(info)
    for output in light.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    for value in light.graph.input:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_value < 0:  # Old exporters of PaddlePaddle write open sizes as -1.
                size.ClearField("dim_value")
    return light
