"""Reductions and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchq.frontends.building.graph import Ints, Value
from torchq.frontends.onnx.context import NodeContext, converter


def reduce_sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return sums in the element type of ``x``."""
    return torch.sum(x, axes, keep, dtype=x.dtype)


def reduce_mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return means; those of integers are rounded toward zero."""
    if x.is_floating_point():
        return torch.mean(x, axes, keep)
    return torch.mean(x.double(), axes, keep).to(x.dtype)


def reduce_prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return products in the element type of ``x``."""
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keep, dtype=x.dtype)
    return x


def reduce_max(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return maxima; of nothing the lowest number of the element type."""
    if not torch.jit.is_tracing() and 0 in [x.shape[axis] for axis in axes]:
        return _of_nothing(x, axes, keep, lowest=True)
    return torch.amax(x, axes, keep)


def reduce_min(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return minima; of nothing the highest number of the element type."""
    if not torch.jit.is_tracing() and 0 in [x.shape[axis] for axis in axes]:
        return _of_nothing(x, axes, keep, lowest=False)
    return torch.amin(x, axes, keep)


def _of_nothing(x: Tensor, axes: list[int], keep: bool, lowest: bool) -> Tensor:
    shape = torch.sum(x.float(), axes, keep).shape
    if x.is_floating_point():
        value: float = -torch.inf if lowest else torch.inf
    elif x.dtype is torch.bool:
        value = not lowest
    else:
        value = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
    return torch.full(shape, value, dtype=x.dtype, device=x.device)


def reduce_l1(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return sums of magnitudes."""
    return reduce_sum(x.abs(), axes, keep)


def reduce_l2(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return roots of sums of squares."""
    return torch.sqrt(
        reduce_sum(x * x, axes, keep).to(x.dtype if x.is_floating_point() else torch.float64)
    ).to(x.dtype)


def reduce_log_sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return logarithms of sums."""
    return torch.log(reduce_sum(x, axes, keep))


def reduce_log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return logarithms of sums of exponentials."""
    return torch.logsumexp(x, axes, keep)


def reduce_sum_square(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return sums of squares."""
    return reduce_sum(x * x, axes, keep)


_FUNCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": reduce_l1,
    "ReduceL2": reduce_l2,
    "ReduceLogSum": reduce_log_sum,
    "ReduceLogSumExp": reduce_log_sum_exp,
    "ReduceMax": reduce_max,
    "ReduceMean": reduce_mean,
    "ReduceMin": reduce_min,
    "ReduceProd": reduce_prod,
    "ReduceSum": reduce_sum,
    "ReduceSumSquare": reduce_sum_square,
}


#: What reductions do to single elements.
_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square,
    "ReduceLogSum": torch.log,
}


@converter(*_FUNCTIONS)
def _reduce(node: NodeContext) -> Value:
    keep = bool(node.attr("keepdims", 1))
    if node.input(1) is not None and node.constant(1) is None:
        empty = bool(node.attr("noop_with_empty_axes", 0))
        return node.call(reduce_along, node.op_type, *node.inputs, keep, empty)
    axes = node.axes()
    if not axes and node.attr("noop_with_empty_axes", 0):
        axes = []
    elif not axes:
        if node.shape(0) is None:
            return node.call(reduce_along, node.op_type, node.inputs[0], [], keep, False)
        axes = list(range(node.ndim(0)))
    value = node.inputs[0]
    if node.op_type == "ReduceProd" and isinstance(value, Ints) and not value.scalar:
        product: object = 1
        for item in value.items:
            product = node.arithmetic(_times, product, item)  # type: ignore[arg-type]
        return node.sizes([product], scalar=not keep)  # type: ignore[list-item]
    if not axes:
        return _without_axes(node)
    if node.op_type == "ReduceMean" and node.floating(0):
        return node.call(torch.mean, value, axes, keep)
    return node.call(_FUNCTIONS[node.op_type], value, axes, keep)


def reduce_along(
    kind: str, x: Tensor, axes: Tensor | Sequence[int], keep: bool, empty: bool
) -> Tensor:
    """Return a reduction of a tensor of any number of dimensions, or along computed axes.

    ``empty`` axes mean none instead of all.
    """
    places = axes.tolist() if isinstance(axes, Tensor) else list(axes)
    if not places and empty:
        return _ELEMENTWISE.get(kind, _same)(x)
    return _FUNCTIONS[kind](x, places or list(range(x.dim())), keep)


def _same(x: Tensor) -> Tensor:
    return x


def _times(a: int, b: int) -> int:
    return a * b


def _without_axes(node: NodeContext) -> Value:
    """Convert a reduction over nothing: only what is done to single elements remains."""
    function = _ELEMENTWISE.get(node.op_type)
    return node.inputs[0] if function is None else node.call(function, node.inputs[0])


@converter("CumSum", "CumProd")
def _cumulative(node: NodeContext) -> Value:
    known = node.constant(1)
    axis = node.input(1) if known is None else int(known)
    flags = bool(node.attr("exclusive", 0)), bool(node.attr("reverse", 0))
    return node.call(cumulative, node.inputs[0], axis, *flags, node.op_type == "CumProd")


def cumulative(
    x: Tensor, axis: Tensor | int, exclusive: bool, reverse: bool, product: bool
) -> Tensor:
    """Return running sums or products along ``axis``.

    ``exclusive`` ones leave out the element itself.
    """
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    y = torch.cumprod(x, axis, dtype=x.dtype) if product else torch.cumsum(x, axis, dtype=x.dtype)
    if exclusive:
        first = torch.full_like(y.narrow(axis, 0, 1), 1 if product else 0)
        y = torch.cat([first, y.narrow(axis, 0, y.shape[axis] - 1)], axis)
    return y.flip(axis) if reverse else y
