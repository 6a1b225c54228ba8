"""Sizes, constants, tensors made from sizes, and elements picked by position."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from torchq.frontends.building.graph import Constant, Ints, Value
from torchq.frontends.onnx.context import NodeContext, converter, operators
from torchq.frontends.onnx.converters import movement
from torchq.frontends.onnx.converters.quantization import module_name


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


def non_zero(x: Tensor) -> Tensor:
    """Return the positions of what is not zero, (dimensions of x, count)."""
    return torch.nonzero(x).t()


@converter("Gather", dtypes=None)
def _gather(node: NodeContext) -> Value:
    axis, value, places = node.attr("axis", 0), node.inputs[0], node.constant(1)
    if isinstance(value, Ints) and places is not None and places.dim() <= 1:
        items = [value.items[int(place)] for place in places.reshape(-1).tolist()]
        return node.sizes(items, scalar=places.dim() == 0)
    source = node.builder.shaped.get(value)
    if source is not None and places is not None and places.dim() <= 1:
        numbers = places.reshape(-1).tolist()
        sizes = [node.builder.graph.call_method("size", (source, number)) for number in numbers]
        return node.sizes(sizes, scalar=places.dim() == 0)
    if _is_table(node, axis):
        assert isinstance(value, Constant)
        rows, size = value.tensor.shape
        module = nn.Embedding(rows, size, device="meta")
        module.weight = node.builder.parameter(value)
        return node.module(module, node.inputs[1], name=module_name(node, value))
    if places is not None and places.dim() == 0 and not isinstance(value, Constant):
        return node.call(torch.select, value, axis, int(places))
    return node.call(movement.gather, value, node.inputs[1], axis)


def _is_table(node: NodeContext, axis: int) -> bool:
    """Return True for a lookup in a matrix of weights by token numbers, an embedding."""
    value, dtype = node.inputs[0], node.dtype(1)
    is_weight = isinstance(value, Constant) and value.tensor.dim() == 2 and bool(value.name)
    if not is_weight or axis != 0 or node.constant(1) is not None:
        return False
    assert isinstance(value, Constant)
    return value.tensor.is_floating_point() and dtype in (torch.int64, torch.int32)


operators(
    {
        "GatherElements": (movement.gather_elements, {"axis": 0}),
        "GatherND": (movement.gather_nd, {"batch_dims": 0}),
        "NonZero": (non_zero, {}),
        "OneHot": (movement.one_hot, {"axis": -1}),
        "Scatter": (movement.scatter_elements, {"axis": 0, "reduction": "none"}),
        "ScatterElements": (movement.scatter_elements, {"axis": 0, "reduction": "none"}),
        "ScatterND": (movement.scatter_nd, {"reduction": "none"}),
    },
    dtypes=None,
)


@converter("ArgMax", "ArgMin")
def _arg(node: NodeContext) -> Value:
    last = bool(node.attr("select_last_index", 0))
    axis, keep = node.attr("axis", 0), bool(node.attr("keepdims", 1))
    return node.call(arg_extreme, node.inputs[0], axis, keep, last, node.op_type == "ArgMax")


def arg_extreme(x: Tensor, axis: int, keep: bool, last: bool, largest: bool) -> Tensor:
    """Return where the largest or smallest element along ``axis`` is.

    The first, or the last one of several.
    """
    function = torch.argmax if largest else torch.argmin
    if not last:
        return function(x, axis, keep)
    return x.shape[axis] - 1 - function(x.flip(axis), axis, keep)


@converter("TopK")
def _top_k(node: NodeContext) -> list[Value]:
    count = node.attributes["k"] if "k" in node.attributes else node.number(1)
    axis, largest = node.attr("axis", -1), bool(node.attr("largest", 1))
    return node.call_parts(2, top_k, node.inputs[0], count, axis, largest)


def top_k(x: Tensor, k: Tensor | int, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest or smallest elements in order, and their positions.

    Of equal ones the first come first.
    """
    if torch.onnx.is_in_onnx_export():  # the operator in the file has this order of equal ones
        return torch.topk(x, int(k), axis, largest)
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    count = int(k)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)
