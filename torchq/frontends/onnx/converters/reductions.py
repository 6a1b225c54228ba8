"""Reductions and cumulative sums."""

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
        node.refuse("a maximum of nothing is not supported")
    if axes == [] and not none and shape is not None:
        axes = list(range(len(shape)))
    if kind == "ReduceProd" and isinstance(value, Ints) and axes == [0]:
        product = fold(lambda a, b: node.arithmetic(mul, a, b), value.items or (1,))
        return node.sizes([product], scalar=not keep)
    if kind == "ReduceMean" and node.floating(0) and isinstance(axes, list) and axes:
        return node.call(torch.mean, value, axes, keep)
    return node.call(reduce, value, kind, axes, keep, none)


@converter("CumSum")
def _cumulative(node: NodeContext) -> Value:
    flags = node.attr("exclusive", False), node.attr("reverse", False)
    return node.call(cumulative, node.inputs[0], node.number(1), *flags)


@one_call
def cumulative(x: Tensor, axis: Tensor | int, exclusive: bool, reverse: bool) -> Tensor:
    """Return running sums along ``axis``; ``exclusive`` ones leave out the element itself."""
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    y = torch.cumsum(x, axis, dtype=x.dtype)
    y = F.pad(y.movedim(axis, -1), [1, -1]).movedim(-1, axis) if exclusive else y
    return y.flip(axis) if reverse else y
