"""Reductions and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from operator import mul
from typing import Any

import torch
from torch import Tensor

from torchq.frontends.building.graph import Ints, Value
from torchq.frontends.onnx.context import NodeContext, converter

#: What reductions do to single elements, and then to all.
_PARTS: dict[str, tuple[Callable[[Tensor], Tensor] | None, str]] = {
    "ReduceL1": (torch.abs, "sum"),
    "ReduceL2": (torch.square, "root"),
    "ReduceLogSum": (None, "log"),
    "ReduceLogSumExp": (None, "logsumexp"),
    "ReduceMax": (None, "amax"),
    "ReduceMean": (None, "mean"),
    "ReduceMin": (None, "amin"),
    "ReduceProd": (None, "prod"),
    "ReduceSum": (None, "sum"),
    "ReduceSumSquare": (torch.square, "sum"),
}
#: What remains of reductions over nothing.
_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square,
    "ReduceLogSum": torch.log,
}


def reduce(
    x: Tensor, op_type: str, axes: Tensor | Sequence[int], keep: bool, empty: bool
) -> Tensor:
    """Return a reduction in the type of ``x``; no axes are all of them, or none if ``empty``.

    Means of integers round toward zero.
    """
    axes = axes.tolist() if isinstance(axes, Tensor) else list(axes)
    axes = list(range(x.dim())) if not axes and not empty else axes
    before, kind = (_ELEMENTWISE.get(op_type), "none") if not axes else _PARTS[op_type]
    y = x if before is None else before(x)
    if kind == "none":
        return y
    if kind in ("amax", "amin"):
        return _extreme(y, axes, keep, lowest=kind == "amax")
    if kind == "logsumexp":
        return torch.logsumexp(y, axes, keep)
    if kind == "mean":
        wide = y if y.is_floating_point() else y.double()
        return torch.mean(wide, axes, keep).to(y.dtype)
    if kind == "prod":
        for axis in sorted((axis % y.dim() for axis in axes), reverse=True):
            y = torch.prod(y, axis, keep, dtype=y.dtype)
        return y
    total = torch.sum(y, axes, keep, dtype=y.dtype)
    if kind == "root":
        return torch.sqrt(total if x.is_floating_point() else total.double()).to(x.dtype)
    return torch.log(total) if kind == "log" else total


def _extreme(x: Tensor, axes: list[int], keep: bool, lowest: bool) -> Tensor:
    """Return maxima or minima; of nothing the lowest or highest number of the element type."""
    if torch.jit.is_tracing() or 0 not in [x.shape[axis] for axis in axes]:
        return (torch.amax if lowest else torch.amin)(x, axes, keep)
    if x.is_floating_point():
        value: float = -torch.inf if lowest else torch.inf
    elif x.dtype is torch.bool:
        value = not lowest
    else:
        value = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
    shape = torch.sum(x.float(), axes, keep).shape
    return torch.full(shape, value, dtype=x.dtype, device=x.device)


@converter(*_PARTS)
def _reduce(node: NodeContext) -> Value:
    keep, empty = node.attr("keepdims", True), node.attr("noop_with_empty_axes", False)
    value, is_known = node.inputs[0], node.input(1) is None or node.constant(1) is not None
    axes: Any = (node.axes() or []) if is_known else node.inputs[1]
    if axes == [] and empty and node.op_type not in _ELEMENTWISE:
        return value
    if axes == [] and not empty and node.shape(0) is not None:
        axes = list(range(node.ndim(0)))
    if node.op_type == "ReduceProd" and isinstance(value, Ints) and axes == [0]:
        product = fold(lambda a, b: node.arithmetic(mul, a, b), value.items or (1,))
        return node.sizes([product], scalar=not keep)
    if node.op_type == "ReduceMean" and node.floating(0) and isinstance(axes, list) and axes:
        return node.call(torch.mean, value, axes, keep)
    return node.call(reduce, value, node.op_type, axes, keep, empty)


@converter("CumSum")
def _cumulative(node: NodeContext) -> Value:
    flags = node.attr("exclusive", False), node.attr("reverse", False)
    return node.call(cumulative, node.inputs[0], node.number(1), *flags)


def cumulative(x: Tensor, axis: Tensor | int, exclusive: bool, reverse: bool) -> Tensor:
    """Return running sums along ``axis``; ``exclusive`` ones leave out the element itself."""
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    y = torch.cumsum(x, axis, dtype=x.dtype)
    if exclusive:
        first = torch.zeros_like(y.narrow(axis, 0, 1))
        y = torch.cat([first, y.narrow(axis, 0, y.shape[axis] - 1)], axis)
    return y.flip(axis) if reverse else y
