"""Functions that move, pick and repeat elements.

Sizes are numbers, or tensors that the network computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST = 2**33


def _numbers(sizes: Tensor | Sequence[int]) -> list[int]:
    return sizes.reshape(-1).tolist() if isinstance(sizes, Tensor) else list(sizes)


def check_size(sizes: Sequence[int], what: str) -> None:
    """Refuse a shape with more elements than any machine holds.

    Raises:
        ValueError: the text names ``what`` and the shape.
    """
    if torch.jit.is_tracing():
        return  # sizes are tensors there, and their product must not become part of the graph
    count = 1
    for size in sizes:
        count *= size
    if isinstance(count, int) and count > _LARGEST:
        raise ValueError(
            f"{what}: got the shape {tuple(sizes)}; expected at most {_LARGEST} elements"
        )


def reshape(x: Tensor, shape: Tensor | Sequence[int], allow_zero: bool) -> Tensor:
    """Return ``x`` in another shape.

    -1 stands for the rest, 0 for the size of ``x`` at that place unless ``allow_zero``.
    """
    sizes = _numbers(shape)
    if not allow_zero:
        sizes = [
            x.shape[i] if isinstance(size, int) and size == 0 else size
            for i, size in enumerate(sizes)
        ]
    return torch.reshape(x, sizes)


def transpose(x: Tensor) -> Tensor:
    """Return ``x`` with its dimensions in reverse order."""
    return x.permute(tuple(reversed(range(x.dim()))))


def expand(x: Tensor, shape: Tensor | Sequence[int]) -> Tensor:
    """Return ``x`` broadcast with ``shape``, in both directions."""
    sizes = _numbers(shape)
    missing = x.dim() - len(sizes)
    sizes = [1] * missing + sizes
    own = [1] * (len(sizes) - x.dim()) + list(x.shape)
    result = [a if isinstance(b, int) and b == 1 else b for a, b in zip(own, sizes, strict=True)]
    check_size(result, "expand")
    return x.expand(result)


def tile(x: Tensor, repeats: Tensor | Sequence[int]) -> Tensor:
    """Return ``x`` repeated along each dimension."""
    counts = _numbers(repeats)
    check_size([a * b for a, b in zip(x.shape, counts, strict=True)], "tile")
    return x.repeat(counts)


def constant_of_shape(
    shape: Tensor | Sequence[int], value: float | bool, dtype: torch.dtype
) -> Tensor:
    """Return a tensor of one value."""
    sizes = _numbers(shape)
    check_size(sizes, "constant_of_shape")
    return torch.full(sizes, value, dtype=dtype)


def range_of(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """Return ``start, start + delta, ...`` below ``limit``, in the element type of ``start``."""
    count = max(0, int(torch.ceil((limit.double() - start.double()) / delta.double())))
    check_size([count], "range_of")
    return (start + torch.arange(count, device=start.device).to(start.dtype) * delta).to(
        start.dtype
    )


def triangle(x: Tensor, k: Tensor | int, upper: bool) -> Tensor:
    """Return the upper or lower triangle of matrices, seen from the k-th diagonal."""
    k = int(k)
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        return x
    return torch.triu(x, k) if upper else torch.tril(x, k)


def slice_axes(
    x: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Tensor:
    """Return a slice; negative numbers count from the end, steps may be negative."""
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _slice_axis(x, start, end, axis, step)
    return x


def _slice_axis(x: Tensor, start: int, end: int, axis: int, step: int) -> Tensor:
    if step > 0:
        index = [slice(None)] * (axis % x.dim()) + [slice(start, end, step)]
        return x[tuple(index)]
    size = x.shape[axis]
    places = range(*slice(start, None if end < -size else end, step).indices(size))
    return x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))


def slice_by_tensors(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None, steps: Tensor | None
) -> Tensor:
    """Return a slice whose bounds the network computes."""
    places = list(range(starts.numel())) if axes is None else axes.tolist()
    strides = [1] * starts.numel() if steps is None else steps.tolist()
    return slice_axes(x, starts.tolist(), ends.tolist(), places, strides)


def split(
    x: Tensor, sizes: Tensor | Sequence[int] | None, count: int, axis: int
) -> tuple[Tensor, ...]:
    """Return parts of ``x`` along ``axis``.

    Of the given sizes, or ``count`` parts, the last one smaller if need be.
    """
    if sizes is None:
        size = -(-x.shape[axis] // count)
        parts = list(torch.split(x, max(size, 1), axis))
        empty = x.narrow(axis, 0, 0)
        return tuple(parts + [empty] * (count - len(parts)))
    return torch.split(x, _numbers(sizes), axis)


def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return the entries of ``x`` along ``axis`` that ``indices`` name.

    Negative ones count from the end.
    """
    indices = indices.to(torch.int64)
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    axis = axis % x.dim()
    found = x.index_select(axis, indices.reshape(-1))
    return found.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return one element of ``x`` for each index, looked up along ``axis``."""
    indices = indices.to(torch.int64)
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """Return the slices of ``x`` at positions that the last dimension of ``indices`` spells out."""
    depth = indices.shape[-1]
    batch, rest = x.shape[:batch_dims], x.shape[batch_dims + depth :]
    flat = x.reshape(batch.numel(), *x.shape[batch_dims:])
    places = indices.reshape(batch.numel(), -1, depth).to(torch.int64)
    rows = torch.arange(batch.numel(), device=x.device).unsqueeze(1)
    index = (rows, *places.unbind(-1))
    found = flat[index] if depth else flat.unsqueeze(1)
    return found.reshape((*batch, *indices.shape[batch_dims:-1], *rest))


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str
) -> Tensor:
    """Return ``x`` with updates written to, or combined with, elements along ``axis``."""
    indices = indices.to(torch.int64)
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _REDUCE[reduction])


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """Return ``x`` with updates written to, or combined with, slices that ``indices`` name."""
    depth, indices = indices.shape[-1], indices.to(torch.int64)
    leading = x.shape[:depth]
    sizes = torch.tensor(leading, device=x.device)
    indices = torch.where(indices < 0, indices + sizes, indices)
    flat_index = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for axis in range(depth):
        flat_index = flat_index * leading[axis] + indices[..., axis]
    rows = x.reshape(leading.numel(), -1)
    values = updates.reshape(-1, rows.shape[1])
    places = flat_index.reshape(-1, 1).expand_as(values)
    if reduction == "none":
        return rows.scatter(0, places, values).reshape(x.shape)
    return rows.scatter_reduce(0, places, values, _REDUCE[reduction]).reshape(x.shape)


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


def pad(
    x: Tensor,
    pads: Tensor | Sequence[int],
    value: Tensor | float | None,
    axes: Sequence[int] | None,
    mode: str,
) -> Tensor:
    """Return ``x`` padded (all before, then all behind) with a value, or by its own elements.

    Negative pads cut off.
    """
    amounts = _numbers(pads)
    places = [axis % x.dim() for axis in axes] if axes is not None else list(range(x.dim()))
    fill = 0 if value is None else value
    fill = fill.item() if isinstance(fill, Tensor) else fill
    half = len(amounts) // 2
    if mode == "constant":
        per_axis = [(0, 0)] * x.dim()
        for i, axis in enumerate(places):
            per_axis[axis] = (amounts[i], amounts[half + i])
        check_size([n + a + b for n, (a, b) in zip(x.shape, per_axis, strict=True)], "pad")
        return F.pad(x, [side for pair in reversed(per_axis) for side in pair], value=fill)
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


def depth_to_space(x: Tensor, block: int, column_first: bool) -> Tensor:
    """Return channels laid out as blocks of pixels; ``column_first`` is ONNX's mode CRD."""
    n, c, h, w = x.shape
    if column_first:
        return F.pixel_shuffle(x, block)
    y = x.reshape(n, block, block, c // (block * block), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // (block * block), h * block, w * block)


def space_to_depth(x: Tensor, block: int, column_first: bool) -> Tensor:
    """Return blocks of pixels laid out as channels."""
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // block, block, w // block, block)
    y = y.permute(0, 1, 3, 5, 2, 4) if column_first else y.permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * block * block, h // block, w // block)
