"""Arithmetic, reductions and norms as MXNet defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "lesser": torch.lt,
    "lesser_equal": torch.le,
}
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}
_LOGICAL: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
}


def compare(kind: str, a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a comparison holds, else 0, in the element type of ``a``."""
    return _COMPARISONS[kind](a, b).to(a.dtype)


def logical(kind: str, a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a logical operation on "is not zero" holds, else 0."""
    other = b if isinstance(b, Tensor) else torch.tensor(b, device=a.device)
    return _LOGICAL[kind](a, other).to(a.dtype)


def modulo(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return the remainder with the sign of the divisor, 0 where the divisor is 0."""
    left, right = torch.as_tensor(a), torch.as_tensor(b)
    found = torch.remainder(left, right)
    return torch.where(right == 0, torch.zeros_like(found), found)


def add_all(*tensors: Tensor) -> Tensor:
    """Return the sum of tensors, added from left to right."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def rint(x: Tensor) -> Tensor:
    """Round to whole numbers, and halves down."""
    low = x.floor()
    return torch.where(x - low <= 0.5, low, low + 1)


def round_half_away(x: Tensor) -> Tensor:
    """Round to whole numbers, and halves away from zero."""
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Return ``alpha * x + beta``, at least 0 and at most 1."""
    return (alpha * x + beta).clamp(0, 1)


def elu(x: Tensor, slope: float) -> Tensor:
    """Return ``x``, or ``slope * (exp(x) - 1)`` where it is negative."""
    return F.elu(x, slope)


def smooth_l1(x: Tensor, scalar: float) -> Tensor:
    """Return ``(scalar * x)**2 / 2`` near zero and ``|x| - 1 / (2 * scalar**2)`` elsewhere."""
    square = scalar * scalar
    return torch.where(x.abs() < 1 / square, 0.5 * square * x * x, x.abs() - 0.5 / square)


def softmax_rows(x: Tensor) -> Tensor:
    """Return a softmax over all dimensions but the first."""
    return x.flatten(1).softmax(1).view_as(x)


def _axes(x: Tensor, axes: Sequence[int], exclude: bool) -> list[int]:
    """Return the axes of a reduction: all where none are given, the others if ``exclude``."""
    chosen = [axis % x.dim() for axis in axes]
    if exclude:
        return [axis for axis in range(x.dim()) if axis not in chosen]
    return chosen or list(range(x.dim()))


def reduce(x: Tensor, kind: str, axes: Sequence[int], keepdims: bool, exclude: bool) -> Tensor:
    """Return sums, means, products, maxima or minima along axes."""
    places = _axes(x, axes, exclude)
    if not places:
        return x
    if kind.startswith("nan"):
        x, kind = torch.where(x.isnan(), float(kind == "nanprod"), x), kind[3:]
    if kind == "prod":
        for axis in sorted(places, reverse=True):
            x = x.prod(axis, keepdim=True)
        result = x if keepdims else x.squeeze(places)
    else:
        result = _REDUCTIONS[kind](x, places, keepdim=keepdims)
    # MXNet has no tensors without dimensions: all that is reduced leaves a vector of one element.
    return result.reshape(1) if result.dim() == 0 else result


def norm(x: Tensor, order: int, axes: Sequence[int], keepdims: bool) -> Tensor:
    """Return norms along axes."""
    found = torch.linalg.vector_norm(x, order, _axes(x, axes, False), keepdims)
    return found.reshape(1) if found.dim() == 0 else found


def top(x: Tensor, kind: str, axis: int | None, count: int, ascending: bool) -> Tensor:
    """Return the places of extreme elements as numbers, or sorted values.

    Args:
        x: of any shape.
        kind: ``"argmax"``, ``"argmin"``, ``"sort"``, ``"argsort"``, ``"indices"``, ``"value"`` or
            ``"mask"`` (1 at the places).
        axis: None for all elements as one line.
        count: of places for the last three kinds; 0 for all.
        ascending: the smallest first.
    """
    if axis is None:
        x, axis = x.reshape(-1), 0
    if kind in ("argmax", "argmin"):
        values = x if kind == "argmax" else -x
        return values.argmax(axis).to(torch.float32)
    values, places = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    if kind in ("sort", "argsort"):
        return values if kind == "sort" else places.to(torch.float32)
    size = count or x.shape[axis]
    values, places = values.narrow(axis, 0, size), places.narrow(axis, 0, size)
    if kind == "mask":
        return torch.zeros_like(x).scatter(axis, places, 1.0)
    return values if kind == "value" else places.to(torch.float32)


def dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return products summed over the last axis of ``a`` and the first of ``b``.

    The transposed operands are summed over the first axis and the last one.
    """
    axes = ([0 if transpose_a else a.dim() - 1], [b.dim() - 1 if transpose_b else 0])
    found = torch.tensordot(a, b, dims=axes)
    return found.reshape(1) if found.dim() == 0 else found


def batch_dot(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return the matmul of each pair of matrices."""
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


def _along(parameter: Tensor, ndim: int, axis: int) -> Tensor:
    return parameter.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])


def batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor, eps: float, axis: int
) -> Tensor:
    """Return a BatchNorm with fixed statistics along any axis."""
    g, b, m, v = (_along(part, x.dim(), axis) for part in (gamma, beta, mean, variance))
    return (x - m) / torch.sqrt(v + eps) * g + b


def instance_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Return each channel of each sample normalized, then scaled and shifted."""
    return F.instance_norm(x, weight=gamma, bias=beta, eps=eps)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float, axis: int) -> Tensor:
    """Return lines along one axis normalized, then scaled and shifted."""
    moved = F.layer_norm(x.movedim(axis, -1), gamma.shape, gamma, beta, eps)
    return moved.movedim(-1, axis)


def group_norm(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> Tensor:
    """Return groups of channels normalized; scales belong to groups, or to channels."""
    each = x.shape[1] // gamma.numel()
    return F.group_norm(x, groups, gamma.repeat_interleave(each), beta.repeat_interleave(each), eps)


def l2_normalize(x: Tensor, mode: str, eps: float) -> Tensor:
    """Return ``x`` divided by a root of sums of squares.

    Over a sample (``"instance"``), the channels of a place (``"channel"``), or the places of a
    channel (``"spatial"``).
    """
    first = {"instance": 1, "channel": 1, "spatial": 2}[mode]
    axes = [1] if mode == "channel" else list(range(first, x.dim()))
    return x / torch.sqrt(torch.sum(x * x, axes, keepdim=True) + eps)
