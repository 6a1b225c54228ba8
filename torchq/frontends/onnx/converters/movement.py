"""Sizes, constants, and operators that change shapes or move and pick elements."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchq.frontends.building.functions import (
    depth_to_space,
    lookup,
    permuted,
    positive,
    ranked,
    slice_axis,
    space_to_depth,
)
from torchq.frontends.building.graph import Constant, Ints, Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import CONVERTERS, NUMBERS, NodeContext, converter
from torchq.frontends.onnx.converters.quantization import module_name
from torchq.frontends.onnx.reader import dtype_of


@converter("Constant", dtypes=None)
def _constant(node: NodeContext) -> Value:
    (name, value), *_ = node.attributes.items()
    if name == "value":
        return Constant(value)
    if name.removesuffix("s") not in ("value_float", "value_int"):
        node.refuse("strings and sparse tensors are not supported")
    dtype = torch.float32 if "float" in name else torch.int64
    return Constant(torch.tensor(value, dtype=dtype))


@converter("Shape", dtypes=None)
def _shape(node: NodeContext) -> Value:
    shape = node.shape(0)
    start = node.attr("start", 0)
    end = node.attr("end", int | None)
    if shape is not None:
        places = range(len(shape))[start:end]
        return node.sizes([node.size(0, axis) for axis in places], dtype=torch.int64)
    sizes = node.call(shape_of, node.inputs[0], start, end)
    if (start, end) == (0, None):
        node.builder.shaped[sizes] = node.tensor(node.inputs[0])
    return sizes


@one_call
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
        return node.sizes(
            [node.builder.graph.call_method("dim", (source,))], True, torch.int64
        )
    return node.call(size_of, node.inputs[0])


@one_call
def size_of(x: Tensor) -> Tensor:
    """Return the number of elements of ``x`` as an int64 number."""
    return torch.tensor(x.numel(), dtype=torch.int64)


@converter("ConstantOfShape")
def _constant_of_shape(node: NodeContext) -> Value:
    value = node.attr("value", torch.zeros(1))
    number = value.reshape(-1)[0].item()
    sizes = node.ints(0)
    if sizes is not None and all(isinstance(size, int) for size in sizes):
        check_size(sizes, "ConstantOfShape")  # type: ignore[arg-type]
        # One element in memory however large the shape is: weights of published test models are
        # made like this.
        one = torch.full((), number, dtype=value.dtype)
        return Constant(one.expand(sizes))  # type: ignore[arg-type]
    shape = node.inputs[0] if sizes is None else sizes
    return node.call(constant_of_shape, shape, number, value.dtype)


@converter("EyeLike")
def _eye_like(node: NodeContext) -> Value:
    dtype = dtype_of(node.attr("dtype", 0))
    if node.attr("dtype", 0) and dtype not in NUMBERS:
        node.refuse("torch computes nothing with its elements")
    return node.call(eye_like, node.inputs[0], node.attr("k", 0), dtype)


@one_call
def eye_like(x: Tensor, k: int, dtype: torch.dtype | None) -> Tensor:
    """Return a matrix of the sizes of ``x`` with ones on its k-th diagonal."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return (rows.unsqueeze(1) + k == columns).to(dtype or x.dtype)


@converter("Range")
def _range(node: NodeContext) -> Value:
    bounds: list[object] = []  # numbers, and nodes that compute a size
    for value in node.inputs:
        if isinstance(value, Ints):
            bounds += value.items
        elif isinstance(value, Constant):
            bounds += value.tensor.reshape(-1).tolist()
    dtype = node.dtype(0)
    if (
        dtype is not None
        and len(bounds) == 3
        and any(isinstance(b, fx.Node) for b in bounds)
    ):
        return node.call(torch.arange, *bounds, dtype=dtype)
    return node.call(range_of, *node.inputs)


@one_call
def non_zero(x: Tensor) -> Tensor:
    """Return the positions of what is not zero, (dimensions of x, count)."""
    return torch.nonzero(x).t()


@converter("Gather", dtypes=None)
def _gather(node: NodeContext) -> Value:
    axis = node.attr("axis", 0)
    value = node.inputs[0]
    places = node.constant(1)
    if places is not None and places.dim() <= 1:
        numbers = places.reshape(-1).tolist()
        scalar = places.dim() == 0
        source = node.builder.shaped.get(value)
        if isinstance(value, Ints):
            return node.sizes([value.items[int(number)] for number in numbers], scalar)
        if source is not None:
            calls = [
                node.builder.graph.call_method("size", (source, n)) for n in numbers
            ]
            return node.sizes(calls, scalar)
        if scalar and not isinstance(value, Constant):
            return node.call(torch.select, value, axis, int(places))
    if _is_table(node, axis):
        assert isinstance(value, Constant)
        rows, size = value.tensor.shape
        module = nn.Embedding(rows, size, device="meta")
        module.weight = node.builder.parameter(value)
        return node.module(module, node.inputs[1], name=module_name(node, value))
    return node.call(gather, value, node.inputs[1], axis)


def _is_table(node: NodeContext, axis: int) -> bool:
    """Return True for a lookup in a matrix of weights by token numbers, an embedding."""
    value = node.inputs[0]
    dtype = node.dtype(1)
    is_weight = (
        isinstance(value, Constant) and value.tensor.dim() == 2 and bool(value.name)
    )
    if not is_weight or axis != 0 or node.constant(1) is not None:
        return False
    assert isinstance(value, Constant)
    return value.tensor.is_floating_point() and dtype in (torch.int64, torch.int32)


@converter("ArgMax", "ArgMin")
def _arg(node: NodeContext) -> Value:
    flags = node.attr("keepdims", True), node.attr("select_last_index", False)
    options = node.attr("axis", 0), *flags, node.op_type == "ArgMax"
    return node.call(arg_extreme, node.inputs[0], *options)


@one_call
def arg_extreme(x: Tensor, axis: int, keep: bool, last: bool, largest: bool) -> Tensor:
    """Return where the extreme element along ``axis`` is: the first, or the last of several."""
    function = torch.argmax if largest else torch.argmin
    if not last:
        return function(x, axis, keep)
    return x.shape[axis] - 1 - function(x.flip(axis), axis, keep)


@converter("TopK")
def _top_k(node: NodeContext) -> list[Value]:
    count = node.attr("k", int | None)  # an attribute up to opset 9
    count = node.number(1) if count is None else count
    options = node.attr("axis", -1), node.attr("largest", True)
    return node.call_parts(2, ranked, node.inputs[0], count, *options)


@converter("Reshape", dtypes=None)
def _reshape(node: NodeContext) -> Value:
    sizes = node.ints(1)
    allow_zero = node.attr("allowzero", False)
    if sizes is None:
        return node.call(reshape, node.inputs[0], node.inputs[1], allow_zero)
    if isinstance(node.inputs[0], Ints) and sizes in ([-1], [1], []):
        return node.sizes(node.inputs[0].items, scalar=not sizes)
    shape = list(sizes)
    if not allow_zero:
        shape = [
            node.size(0, axis) if size == 0 else size for axis, size in enumerate(sizes)
        ]
    return node.call(torch.reshape, node.inputs[0], shape)


@converter("Transpose", dtypes=None)
def _transpose(node: NodeContext) -> Value:
    order = node.attr("perm", list | None)
    value = node.inputs[0]
    if order is None:
        return node.call(permuted, value, None)
    result = node.call(torch.permute, value, order)
    if isinstance(value, Constant) and isinstance(result, Constant):
        result = Constant(result.tensor, "", value.name or value.origin)
        weight = node.builder.weights.get(value)
        if weight is not None:
            node.builder.weights[result] = weight.permuted(order)
    return result


@converter("Flatten", dtypes=None)
def _flatten(node: NodeContext) -> Value:
    axis = node.attr("axis", 1)
    if axis == 1 and len(node.shape(0) or ()) > 1:
        return node.module(nn.Flatten(), node.inputs[0])
    return node.call(flatten_at, node.inputs[0], axis)


@one_call
def flatten_at(x: Tensor, axis: int) -> Tensor:
    """Return a matrix: the dimensions before ``axis`` are its rows, the rest its columns."""
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@converter("Squeeze", dtypes=None)
def _squeeze(node: NodeContext) -> Value:
    axes = node.axes()
    value = node.inputs[0]
    shape = node.shape(0)
    if isinstance(value, Ints):
        return node.sizes(
            value.items, scalar=len(value.items) == 1 and not value.scalar
        )
    if axes is None and shape is not None and None not in shape:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    return node.call(torch.squeeze, value, *([] if axes is None else [axes]))


@converter("Unsqueeze", dtypes=None)
def _unsqueeze(node: NodeContext) -> Value:
    axes = node.axes()
    if axes is None:
        node.refuse("its axes are missing")
    if isinstance(node.inputs[0], Ints) and node.inputs[0].scalar and len(axes) == 1:
        return node.sizes(node.inputs[0].items)
    if min(axes) < 0 and len(axes) > 1:
        ndim = node.ndim(0) + len(axes)
        axes = [axis % ndim for axis in axes]
    result = node.inputs[0]
    for axis in sorted(axes):
        result = node.call(torch.unsqueeze, result, axis)
    return result


@converter("Concat", dtypes=None)
def _concat(node: NodeContext) -> Value:
    parts = [node.ints(index) for index in range(len(node.inputs))]
    if any(isinstance(value, Ints) for value in node.inputs) and None not in parts:
        return node.sizes([item for part in parts for item in part or ()])
    return node.call(torch.cat, list(node.inputs), node.attr("axis", int))


@converter("Split", dtypes=None)
def _split(node: NodeContext) -> list[Value]:
    axis = node.attr("axis", 0)
    count = len(node.output_names)
    value = node.inputs[0]
    sizes: Any = node.attr("split", list | None) or node.ints_or_input(1)
    if isinstance(value, Ints) and isinstance(sizes, list):
        ends = list(accumulate(sizes, initial=0))
        return [node.sizes(value.items[start:end]) for start, end in pairwise(ends)]
    size = (node.shape(0) or {axis: None})[axis]
    if sizes is None and size is not None and size % count == 0:
        sizes = size // count
    if isinstance(sizes, (list, int)):
        return node.call_parts(count, torch.split, value, sizes, axis)
    return node.call_parts(count, split, value, sizes, count, axis)


@converter("Slice", dtypes=None)
def _slice(node: NodeContext) -> Value:
    value = node.inputs[0]
    arguments: list[Any] = [node.ints_or_input(index) for index in range(1, 5)]
    starts, ends, axes, steps = arguments
    if not all(isinstance(part, list | None) for part in arguments):
        return node.call(slice_axes, value, *arguments)
    count = len(starts)
    axes, steps = axes or list(range(count)), steps or [1] * count
    numbers = all(isinstance(item, int) for item in (*starts, *ends, *axes, *steps))
    if isinstance(value, Ints) and numbers and count == 1:
        return node.sizes(value.items[_slice_of(starts[0], ends[0], steps[0])])
    if numbers and node.shape(0) is not None and all(step > 0 for step in steps):
        index = [slice(None)] * node.ndim(0)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            index[axis] = _slice_of(start, end, step)
        while index and index[-1] == slice(None):
            index.pop()
        return node.call(_getitem, value, tuple(index)) if index else value
    return node.call(slice_axes, value, starts, ends, axes, steps)


@one_call
def _getitem(x: Any, index: object) -> object:
    return x[index]


def _slice_of(start: int, end: int, step: int) -> slice:
    """Return a Python slice: ONNX writes very large numbers for an open end."""
    stop = None if abs(end) >= 2**31 - 1 or (end < 0 and step < 0) else end
    begin = None if start == 0 and step == 1 else start
    return slice(begin, stop, None if step == 1 else step)


@converter("Expand", "Tile", dtypes=None)
def _expand(node: NodeContext) -> Value:
    function = expand if node.op_type == "Expand" else tile
    return node.call(function, node.inputs[0], node.ints_or_input(1))


@converter("Pad")
def _pad(node: NodeContext) -> Value:
    mode = node.attr("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        node.refuse(f"the mode {mode!r} is not known")
    axes = node.axes(3)
    return node.call(
        pad, node.inputs[0], node.ints_or_input(1), node.number(2), axes, mode
    )


@converter("DepthToSpace", "SpaceToDepth")
def _blocks(node: NodeContext) -> Value:
    block = node.attr("blocksize", int)
    spreads = node.op_type == "DepthToSpace"
    if node.attr("mode", "DCR") == "CRD":
        module = (
            torch.nn.PixelShuffle(block) if spreads else torch.nn.PixelUnshuffle(block)
        )
        return node.module(module, node.inputs[0])
    return node.call(
        depth_to_space if spreads else space_to_depth, node.inputs[0], block
    )


@converter("Trilu")
def _trilu(node: NodeContext) -> Value:
    return node.call(
        triangle, node.inputs[0], node.number(1) or 0, node.attr("upper", True)
    )


_LARGEST = 2**33


def _numbers(sizes: Tensor | Sequence[int]) -> list[int]:
    return sizes.reshape(-1).tolist() if isinstance(sizes, Tensor) else list(sizes)


def check_size(sizes: Sequence[int], what: str) -> None:
    """Refuse a shape with more elements than any machine holds."""
    if torch.jit.is_tracing():
        return  # sizes are tensors there, and their product must not become part of the graph
    count = math.prod(sizes)
    if isinstance(count, int) and count > _LARGEST:
        raise ValueError(
            f"{what}: got the shape {tuple(sizes)}; expected at most {_LARGEST} elements"
        )


@one_call
def reshape(x: Tensor, shape: Tensor | Sequence[int], allow_zero: bool) -> Tensor:
    """Return ``x`` reshaped: -1 is the rest, 0 the size at that place unless ``allow_zero``."""
    sizes = _numbers(shape)
    if not allow_zero:  # a symbolic size is none of the zeros
        sizes = [
            x.shape[i] if isinstance(n, int) and n == 0 else n
            for i, n in enumerate(sizes)
        ]
    return torch.reshape(x, sizes)


@one_call
def expand(x: Tensor, shape: Tensor | Sequence[int]) -> Tensor:
    """Return ``x`` broadcast with ``shape``, in both directions."""
    sizes = _numbers(shape)
    count = max(x.dim(), len(sizes))
    own_sizes, sizes = (
        [1] * (count - len(part)) + list(part) for part in (x.shape, sizes)
    )
    result = [
        a if isinstance(b, int) and b == 1 else b
        for a, b in zip(own_sizes, sizes, strict=True)
    ]
    check_size(result, "expand")
    return x.expand(result)


@one_call
def tile(x: Tensor, repeats: Tensor | Sequence[int]) -> Tensor:
    """Return ``x`` repeated along each dimension."""
    counts = _numbers(repeats)
    check_size([a * b for a, b in zip(x.shape, counts, strict=True)], "tile")
    return x.repeat(counts)


@one_call
def constant_of_shape(
    shape: Tensor | Sequence[int], value: float | bool, dtype: torch.dtype
) -> Tensor:
    """Return a tensor of one value."""
    sizes = _numbers(shape)
    check_size(sizes, "constant_of_shape")
    return torch.full(sizes, value, dtype=dtype)


@one_call
def range_of(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """Return ``start, start + delta, ...`` below ``limit``, in the element type of ``start``."""
    count = max(0, int(torch.ceil((limit.double() - start.double()) / delta.double())))
    check_size([count], "range_of")
    steps = torch.arange(count, device=start.device).to(start.dtype) * delta
    return (start + steps).to(start.dtype)


@one_call
def triangle(x: Tensor, k: Tensor | int, upper: bool) -> Tensor:
    """Return the upper or lower triangle of matrices, seen from the k-th diagonal."""
    return torch.triu(x, int(k)) if upper else torch.tril(x, int(k))


@one_call
def slice_axes(x: Tensor, *bounds: Tensor | Sequence[int] | None) -> Tensor:
    """Return a slice (starts, ends, axes, steps); negative numbers count from the end."""
    starts, ends, axes, steps = [
        [] if part is None else _numbers(part) for part in bounds
    ]
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        before_all = step < 0 and end < -x.shape[axis]
        x = slice_axis(x, axis, start, None if before_all else end, step)
    return x


@one_call
def split(
    x: Tensor, sizes: Tensor | Sequence[int] | None, count: int, axis: int
) -> tuple[Tensor, ...]:
    """Return parts of the given sizes, or ``count`` parts, the last one smaller if need be."""
    if sizes is None:
        size = -(-x.shape[axis] // count)
        parts = list(torch.split(x, max(size, 1), axis))
        empty = x.narrow(axis, 0, 0)
        return tuple(parts + [empty] * (count - len(parts)))
    return torch.split(x, _numbers(sizes), axis)


@one_call
def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return the entries of ``x`` along ``axis`` that ``indices`` name."""
    axis = axis % x.dim()
    return lookup(x, positive(indices, x.shape[axis]), axis)


@one_call
def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return one element of ``x`` for each index, looked up along ``axis``."""
    return torch.gather(x, axis, positive(indices, x.shape[axis]))


@one_call
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """Return the slices of ``x`` at positions that the last dimension of ``indices`` spells out."""
    behind = range(indices.dim() - 2, -1, -1)
    sizes = zip(indices.shape[:batch_dims], behind, strict=False)
    batch = [
        torch.arange(n, device=x.device).view(-1, *[1] * more) for n, more in sizes
    ]
    places = (*batch, *indices.long().unbind(-1))
    return x[places]


@one_call
def one_hot(indices: Tensor, depth: Tensor, values: Tensor, axis: int) -> Tensor:
    """Return ``values[1]`` at the indices of a new axis of ``depth``, ``values[0]`` elsewhere."""
    count = int(depth.reshape(-1)[0])
    check_size([*indices.shape, count], "one_hot")
    indices = torch.where(indices < 0, indices + count, indices)
    shape = [1] * (indices.dim() + 1)
    axis = axis % len(shape)
    shape[axis] = count
    classes = torch.arange(count, device=indices.device).to(indices.dtype).view(shape)
    return torch.where(indices.unsqueeze(axis) == classes, values[1], values[0])


@one_call
def pad(
    x: Tensor,
    pads: Tensor | Sequence[int],
    value: Tensor | float | None,
    axes: Sequence[int] | None,
    mode: str,
) -> Tensor:
    """Return ``x`` padded (all before, then behind) by a value or itself; negative pads cut off."""
    amounts = _numbers(pads)
    places = (
        [axis % x.dim() for axis in axes] if axes is not None else list(range(x.dim()))
    )
    fill = 0 if value is None else value
    fill = fill.item() if isinstance(fill, Tensor) else fill
    half = len(amounts) // 2
    if mode == "constant":
        per_axis = [(0, 0)] * x.dim()
        for i, axis in enumerate(places):
            per_axis[axis] = (amounts[i], amounts[half + i])
        check_size(
            [n + a + b for n, (a, b) in zip(x.shape, per_axis, strict=True)], "pad"
        )
        return F.pad(
            x, [side for pair in reversed(per_axis) for side in pair], value=fill
        )
    for i, axis in enumerate(places):
        x = _pad_by_own(x, axis, amounts[i], amounts[half + i], mode)
    return x


def _pad_by_own(x: Tensor, axis: int, before: int, behind: int, mode: str) -> Tensor:
    """Pad one axis by the elements of ``x``: of the edge, mirrored, or from the other end."""
    size = x.shape[axis]
    if not before and not behind:
        return x
    places = torch.arange(-before, size + behind, device=x.device)
    if mode == "edge":
        places = places.clamp(0, size - 1)
    elif mode == "wrap":
        places = places % size
    else:
        period = max(1, 2 * (size - 1))
        places = places % period
        places = torch.where(places >= size, period - places, places)
    return x.index_select(axis, places)


CONVERTERS.row("GatherElements", gather_elements, axis=0)
CONVERTERS.row("GatherND", gather_nd, batch_dims=0)
CONVERTERS.row("NonZero", non_zero)
CONVERTERS.row("OneHot", one_hot, axis=-1)
