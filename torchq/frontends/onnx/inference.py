"""Shapes and element types of the tensors of a file, before and while it is converted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from torchq.frontends.onnx.reader import dtype_of
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)

#: Initializers up to this size take part in shape inference: vectors of sizes, not weights.
_SMALL = 1024
Shapes = dict[str, list[int | None]]


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
