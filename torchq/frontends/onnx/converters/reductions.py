"""Reductions, and running sums and products."""

from collections.abc import Callable, Sequence
from functools import reduce as fold
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.frontends.building.graph import Ints, Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NodeContext, converter

_Change = Callable[[Tensor], Tensor] | None
#: What a reduction does to single elements, to all of them, and to the result.
_PARTS: dict[str, tuple[_Change, str, _Change]] = {
    "ReduceL1": (torch.abs, "sum", None),
    "ReduceL2": (torch.square, "sum", torch.sqrt),
    "ReduceLogSum": (None, "sum", torch.log),
    "ReduceLogSumExp": (None, "logsumexp", None),
    "ReduceMax": (None, "amax", None),
    "ReduceMean": (None, "mean", None),
    "ReduceMin": (None, "amin", None),
    "ReduceProd": (None, "prod", None),
    "ReduceSum": (None, "sum", None),
    "ReduceSumSquare": (torch.square, "sum", None),
}


@one_call
def reduce(
    x: Tensor, op_type: str, axes: Tensor | Sequence[int], keep: bool, none: bool
) -> Tensor:
    """Return a reduction in the type of ``x``; no axes are all of them, or none if ``none``."""
    axes = axes.tolist() if isinstance(axes, Tensor) else list(axes)
    axes = axes if axes or none else list(range(x.dim()))
    before, kind, after = _PARTS[op_type]
    y = x if before is None else before(x)
    if kind == "prod":
        for axis in sorted((axis % y.dim() for axis in axes), reverse=True):
            y = torch.prod(y, axis, keep, dtype=y.dtype)
    elif axes:
        options = {"dtype": y.dtype} if kind == "sum" else {}
        y = getattr(torch, kind)(y, axes, keep, **options)
    return y if after is None else after(y)


@one_call
def extreme_of_nothing(
    x: Tensor, axes: Tensor | Sequence[int], keep: bool, none: bool, largest: bool
) -> Tensor:
    """Return the least number of a type where a maximum of no elements is asked for."""
    axes = axes.tolist() if isinstance(axes, Tensor) else list(axes)
    axes = axes if axes or none else list(range(x.dim()))
    places = {axis % x.dim() for axis in axes}
    sizes = [1 if axis in places else size for axis, size in enumerate(x.shape)]
    if not keep:
        sizes = [size for axis, size in enumerate(x.shape) if axis not in places]
    if x.dtype is torch.bool:
        return x.new_full(sizes, not largest)
    if x.is_floating_point():
        return x.new_full(sizes, -torch.inf if largest else torch.inf)
    bounds = torch.iinfo(x.dtype)
    return x.new_full(sizes, bounds.min if largest else bounds.max)


@converter(*_PARTS)
def _reduce(node: NodeContext) -> Value:
    keep = node.attr("keepdims", True)
    none = node.attr("noop_with_empty_axes", False)
    kind = node.op_type
    value = node.inputs[0]
    shape = node.shape(0)
    is_known = node.input(1) is None or node.constant(1) is not None
    axes: Any = (node.axes() or []) if is_known else node.inputs[1]
    if kind in ("ReduceMax", "ReduceMin") and 0 in (shape or ()):
        options = axes, keep, none, kind == "ReduceMax"
        return node.call(extreme_of_nothing, value, *options)
    if axes == [] and not none and shape is not None:
        axes = list(range(len(shape)))
    if kind == "ReduceProd" and isinstance(value, Ints) and axes == [0]:
        product = fold(lambda a, b: node.arithmetic(mul, a, b), value.items or (1,))
        return node.sizes([product], scalar=not keep)
    if kind == "ReduceMean" and node.floating(0) and isinstance(axes, list) and axes:
        return node.call(torch.mean, value, axes, keep)
    return node.call(reduce, value, kind, axes, keep, none)


@converter("LpNormalization")
def _lp_normalization(node: NodeContext) -> Value:
    order = node.attr("p", 2)
    if order not in (1, 2):
        node.refuse(f"its p is {order}; expected 1 or 2")
    return node.call(lp_normalized, node.inputs[0], order, node.attr("axis", -1))


@one_call
def lp_normalized(x: Tensor, order: int, axis: int) -> Tensor:
    """Return ``x`` divided by its norm along ``axis``, zeros where that is zero."""
    if order == 1:
        norm = x.abs().sum(axis, keepdim=True)
    else:
        norm = x.square().sum(axis, keepdim=True).sqrt()
    return torch.where(norm == 0, 0, x / torch.where(norm == 0, 1, norm))


@converter("CumSum", "CumProd")
def _cumulative(node: NodeContext) -> Value:
    flags = node.attr("exclusive", False), node.attr("reverse", False)
    is_product = node.op_type == "CumProd"
    return node.call(cumulative, node.inputs[0], node.number(1), *flags, is_product)


@one_call
def cumulative(
    x: Tensor, axis: Tensor | int, exclusive: bool, reverse: bool, product: bool
) -> Tensor:
    """Return running sums or products; ``exclusive`` ones leave out the element itself."""
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    function = torch.cumprod if product else torch.cumsum
    y = function(x, axis, dtype=x.dtype)
    if exclusive:
        moved = F.pad(y.movedim(axis, -1), [1, -1], value=int(product))
        y = moved.movedim(-1, axis)
    return y.flip(axis) if reverse else y
