"""Shapes and element types of the tensors of a file, before and while it is converted."""

import logging
import math
from typing import Any

import torch

from torchq.frontends.onnx.reader import dtype_of, graphs
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)

#: Initializers up to this size take part in shape inference: vectors of sizes, not weights.
_SMALL = 1024
Sizes = list["int | str | None"]


def infer_types(model: Any, where: str) -> tuple[dict[str, Sizes], dict[str, torch.dtype | None]]:
    """Infer shapes, with the names of open sizes, and element types, as far as they are known."""
    light = _light_copy(model)
    try:
        onnx = import_optional("onnx", "from_onnx")
        light = onnx.shape_inference.infer_shapes(light)
    except Exception as error:  # the binding raises several kinds; the rest may still be converted
        log.debug("%s: shapes are not known: %s", where, error)
    inner = [info for graph in graphs(light.graph, where) for info in graph.value_info]
    infos = [*light.graph.input, *inner, *light.graph.output]
    known = {i.name: i.type.tensor_type for i in infos if i.type.HasField("tensor_type")}
    shapes: dict[str, Sizes] = {}
    for name, kind in known.items():
        if kind.HasField("shape"):
            sizes = kind.shape.dim
            shapes[name] = [
                d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in sizes
            ]
    return shapes, {name: dtype_of(kind.elem_type) for name, kind in known.items()}


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
