"""Operators that choose, order and write whole entries of a tensor."""

import torch
from torch import Tensor

from torchq.frontends.building.functions import positive
from torchq.frontends.building.graph import Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import CONVERTERS, NodeContext, converter


@converter("Compress", dtypes=None)
def _compress(node: NodeContext) -> Value:
    return node.call(compress, *node.inputs, node.attr("axis", int | None))


@one_call
def compress(x: Tensor, condition: Tensor, axis: int | None) -> Tensor:
    """Return the entries along ``axis`` that a condition chooses, of all elements without one."""
    places = torch.nonzero(condition.reshape(-1)).reshape(-1)
    if axis is None:
        return x.reshape(-1).index_select(0, places)
    return x.index_select(axis, places)


@converter("Unique")
def _unique(node: NodeContext) -> list[Value]:
    options = node.attr("axis", int | None), node.attr("sorted", True)
    return node.call_parts(4, unique, node.inputs[0], *options)


@one_call
def unique(x: Tensor, axis: int | None, in_order: bool) -> tuple[Tensor, ...]:
    """Return the different entries, sorted or as they come first.

    Behind them: where each comes first, which one every entry is, and how many there are of each.
    """
    values, inverse, counts = torch.unique(x, True, True, True, axis)
    inverse = inverse.reshape(-1)
    places = torch.arange(inverse.numel(), device=x.device)
    first = places.new_full(counts.shape, inverse.numel())
    first = first.scatter_reduce(0, inverse, places, "amin")
    if not in_order:
        order = torch.argsort(first)
        values = values.index_select(axis or 0, order)
        first, counts = first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return values, first, inverse, counts


@converter("ReverseSequence", dtypes=None)
def _reverse_sequence(node: NodeContext) -> Value:
    axes = node.attr("batch_axis", 1), node.attr("time_axis", 0)
    if sorted(axes) != [0, 1]:
        node.refuse(f"its axes of batch and time are {axes}; expected 0 and 1")
    return node.call(reverse_sequence, *node.inputs, axes[1])


@one_call
def reverse_sequence(x: Tensor, lengths: Tensor, time_axis: int) -> Tensor:
    """Return ``x`` with the first ``lengths`` steps of each sequence in reversed order."""
    steps = torch.arange(x.shape[time_axis], device=x.device)
    last = lengths.to(torch.int64).unsqueeze(1) - 1
    places = torch.where(steps <= last, last - steps, steps)
    places = places.t() if time_axis == 0 else places
    places = places.reshape(*places.shape, *[1] * (x.dim() - 2))
    return torch.gather(x, time_axis, places.expand(x.shape))


@converter("TensorScatter", dtypes=None)
def _tensor_scatter(node: NodeContext) -> Value:
    mode = node.attr("mode", "linear")
    if mode not in ("linear", "circular"):
        node.refuse(f"its mode is {mode!r}; expected 'linear' or 'circular'")
    options = node.attr("axis", -2), mode == "circular"
    return node.call(tensor_scatter, *node.inputs[:2], node.input(2), *options)


@one_call
def tensor_scatter(
    cache: Tensor, update: Tensor, starts: Tensor | None, axis: int, circular: bool
) -> Tensor:
    """Return a cache with entries written along ``axis``, from a place of each sample on."""
    places = torch.arange(update.shape[axis], device=cache.device).unsqueeze(0)
    if starts is not None:
        places = places + starts.to(torch.int64).unsqueeze(1)
    if circular:
        places = places % cache.shape[axis]
    axis = axis % cache.dim()
    shape = [1] * cache.dim()
    shape[0], shape[axis] = places.shape
    return cache.scatter(axis, places.view(shape).expand(update.shape), update)


@converter("ScatterND", dtypes=None)
def _scatter_nd(node: NodeContext) -> Value:
    reduction = node.attr("reduction", "none")
    if reduction not in ("none", "add", *REDUCTIONS):
        node.refuse(f"the reduction {reduction!r} is not known")
    if reduction in REDUCTIONS:
        return node.call(scatter_nd_reduced, *node.inputs, reduction)
    return node.call(scatter_nd, *node.inputs, reduction == "add")


@one_call
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, add: bool) -> Tensor:
    """Return ``x`` with updates written or added to the slices that ``indices`` name."""
    return x.index_put(indices.long().unbind(-1), updates, add)


#: What torch calls the reductions of ONNX that combine what is there with what is written.
REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


@one_call
def scatter_nd_reduced(
    x: Tensor, indices: Tensor, updates: Tensor, reduction: str
) -> Tensor:
    """Return ``x`` with updates combined with the slices that ``indices`` name."""
    depth = indices.shape[-1]
    places = torch.zeros_like(indices[..., 0], dtype=torch.int64)
    for size, part in zip(x.shape[:depth], indices.long().unbind(-1), strict=True):
        places = places * size + positive(part, size)
    rows = x.reshape(x.shape[:depth].numel(), -1)
    new = updates.reshape(-1, rows.shape[1])
    where = places.reshape(-1, 1).expand(new.shape)
    combined = rows.scatter_reduce(0, where, new, REDUCTIONS[reduction])
    return combined.reshape(x.shape)


@one_call
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str
) -> Tensor:
    """Return ``x`` with updates written to, or combined with, elements along ``axis``."""
    indices = positive(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    names = {"add": "sum", **REDUCTIONS}
    return x.scatter_reduce(axis, indices, updates, names[reduction])


CONVERTERS.row("Scatter ScatterElements", scatter_elements, axis=0, reduction="none")
