"""Sizes, constants, and tensors that are made from sizes."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchq.frontends.building import Constant, Ints, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions import movement
from torchq.frontends.onnx.registry import converter


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
        found = node.call(shape_of, node.inputs[0], node.attr("start", 0), node.attr("end"))
        if not node.attr("start", 0) and node.attr("end") is None:
            node.builder.shaped[found] = node.tensor(node.inputs[0])
        return found
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
    source = node.builder.shaped.get(node.inputs[0])
    if source is not None:  # the number of dimensions
        return node.sizes([node.builder.graph.call_method("dim", (source,))], True, torch.int64)
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
    value = node.inputs[index]
    if isinstance(value, Ints) and len(value.items) == 1:
        return value.items[0]
    if isinstance(value, Constant) and value.tensor.numel() == 1:
        return value.tensor.item()
    return None


@converter("OneHot")
def _one_hot(node: NodeContext) -> Value:
    return node.call(movement.one_hot, *node.inputs, node.attr("axis", -1))
