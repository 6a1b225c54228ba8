"""Sizes, constants, and tensors that are made from sizes."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchq.frontends.building import Constant, Value, stack_ints
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions import movement
from torchq.frontends.onnx.functions.elementwise import cast
from torchq.frontends.onnx.reader import dtype_of
from torchq.frontends.onnx.registry import converter

__all__ = ["shape_of", "size_of"]


@converter("Constant", dtypes=None)
def _constant(node: NodeContext) -> Value:
    if "value" in node.attributes:
        return Constant(node.attributes["value"])
    kinds = {
        "value_float": torch.float32,
        "value_floats": torch.float32,
        "value_int": torch.int64,
        "value_ints": torch.int64,
    }
    for name, dtype in kinds.items():
        if name in node.attributes:
            return Constant(torch.tensor(node.attributes[name], dtype=dtype))
    node.refuse("strings and sparse tensors are not supported")


@converter("Shape", dtypes=None)
def _shape(node: NodeContext) -> Value:
    shape = node.shape(0)
    if shape is None:
        return node.call(shape_of, node.inputs[0], node.attr("start", 0), node.attr("end"))
    places = range(len(shape))[slice(node.attr("start", 0), node.attr("end"))]
    return node.sizes([node.size(0, axis) for axis in places], dtype=torch.int64)


def shape_of(x: Tensor, start: int, end: int | None) -> Tensor:
    """Return the sizes of ``x`` as an int64 vector."""
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


@converter("Size", dtypes=None)
def _size(node: NodeContext) -> Value:
    shape = node.shape(0)
    if shape is not None and None not in shape:
        return node.sizes([torch.Size(shape).numel()], True, torch.int64)  # type: ignore[arg-type]
    return node.call(size_of, node.inputs[0])


def size_of(x: Tensor) -> Tensor:
    """Return the number of elements of ``x`` as an int64 number."""
    return torch.tensor(x.numel(), dtype=torch.int64)


@converter("ConstantOfShape")
def _constant_of_shape(node: NodeContext) -> Value:
    value = node.attr("value", torch.zeros(1))
    number = value.reshape(-1)[0].item()
    sizes = node.ints(0)
    if sizes is not None and all(isinstance(size, int) for size in sizes):
        movement.check_size(sizes, "ConstantOfShape")  # type: ignore[arg-type]
        # One element in memory however large the shape is: weights of published test models are
        # made like this.
        one = torch.full((), number, dtype=value.dtype)
        return Constant(one.expand(sizes))  # type: ignore[arg-type]
    shape = node.inputs[0] if sizes is None else sizes
    return node.call(movement.constant_of_shape, shape, number, value.dtype)


@converter("Range")
def _range(node: NodeContext) -> Value:
    bounds = [_bound(node, index) for index in range(3)]
    dtype = node.dtype(0)
    if dtype is not None and None not in bounds and any(isinstance(b, fx.Node) for b in bounds):
        return node.call(torch.arange, *bounds, dtype=dtype)
    return node.call(movement.range_of, *node.inputs)


def _bound(node: NodeContext, index: int) -> float | fx.Node | None:
    """Return a bound of a range: a number, or a node that computes a size; None for a tensor.

    Detectors compute their grids from sizes that are cast to floats.
    """
    items, value = node.ints(index), node.inputs[index]
    if items is not None:
        return items[0] if len(items) == 1 else None
    if isinstance(value, Constant):
        return value.tensor.item() if value.tensor.numel() == 1 else None
    source = value.args[0] if isinstance(value, fx.Node) and value.target is cast else None
    if isinstance(source, fx.Node) and source.target is stack_ints:
        return source.args[0][0]  # type: ignore[index, return-value]
    return None


@converter("EyeLike")
def _eye_like(node: NodeContext) -> Value:
    dtype = dtype_of(node.attributes["dtype"]) if "dtype" in node.attributes else node.dtype(0)
    if dtype is None:
        node.refuse("its element type is not known")
    return node.call(movement.eye_like, node.inputs[0], dtype, node.attr("k", 0))


@converter("OneHot")
def _one_hot(node: NodeContext) -> Value:
    return node.call(movement.one_hot, *node.inputs, node.attr("axis", -1))
