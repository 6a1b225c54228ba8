"""Shapes, slices, joins and resizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Value
from torchq.frontends.caffe.node import CaffeLayer, converter, operator


@converter("Split")
def _split(layer: CaffeLayer) -> list[Value]:
    return [layer.inputs[0]] * len(layer.layer.tops)


@converter("Concat")
def _concat(layer: CaffeLayer) -> Value:
    settings = layer.settings("concat_param")
    axis = settings.integer("axis", settings.integer("concat_dim", 1))
    if len(layer.inputs) == 1:
        return layer.inputs[0]
    return layer.call(torch.cat, list(layer.inputs), axis)


@converter("Slice")
def _slice(layer: CaffeLayer) -> list[Value]:
    settings = layer.settings("slice_param")
    axis = settings.integer("axis", settings.integer("slice_dim", 1))
    points, count = settings.integers("slice_point"), len(layer.layer.tops)
    if points and len(points) != count - 1:
        layer.refuse(f"got {len(points)} slice points for {count} outputs")
    return layer.call_parts(count, slice_parts, layer.inputs[0], axis, points, count)


@converter("Flatten")
def _flatten(layer: CaffeLayer) -> Value:
    settings = layer.settings("flatten_param")
    start, end = settings.integer("axis", 1), settings.integer("end_axis", -1)
    if (start, end) == (1, -1):
        layer.result_ndim = 2
        return layer.module(nn.Flatten(), layer.inputs[0])
    ndim = layer.ndims[0]
    layer.result_ndim = None if ndim is None else ndim - (end % ndim - start % ndim)
    return layer.call(torch.flatten, layer.inputs[0], start, end)


@converter("Reshape")
def _reshape(layer: CaffeLayer) -> Value:
    settings = layer.settings("reshape_param")
    shape = settings.settings("shape").integers("dim")
    axis, count = settings.integer("axis", 0), settings.integer("num_axes", -1)
    layer.result_ndim = len(shape) if (axis, count) == (0, -1) else None
    return layer.call(reshape, layer.inputs[0], shape, axis, count)


@converter("Permute")
def _permute(layer: CaffeLayer) -> Value:
    order = layer.settings("permute_param").integers("order")
    if layer.ndims[0] == len(order):
        return layer.call(torch.permute, layer.inputs[0], order)
    return layer.call(permute, layer.inputs[0], order)


@converter("Upsample")
def _upsample(layer: CaffeLayer) -> Value:
    scale = layer.settings("upsample_param").integer("scale", 2)
    if len(layer.inputs) != 1:
        layer.refuse("it reads the places of a pooling, which is not supported")
    return layer.module(nn.Upsample(scale_factor=scale, mode="nearest"), layer.inputs[0])


@converter("Interp")
def _interp(layer: CaffeLayer) -> Value:
    settings = layer.settings("interp_param")
    size = [settings.integer("height", 0), settings.integer("width", 0)]
    factors = [settings.integer("shrink_factor", 1), settings.integer("zoom_factor", 1)]
    pads = [settings.integer("pad_beg", 0), settings.integer("pad_end", 0)]
    like = layer.input(1)
    if max(pads) > 0 or min(factors) < 1:
        layer.refuse(f"got pads {pads} and factors {factors}; expected crops, and factors above 0")
    return layer.call(interpolate, layer.inputs[0], like, size, factors, pads)


def reshape(x: Tensor, shape: Sequence[int], axis: int, count: int) -> Tensor:
    """Return ``x`` with ``count`` sizes from ``axis`` on replaced by a shape.

    0 keeps a size, -1 is the rest; a count of -1 replaces all.
    """
    sizes = list(x.shape)
    start = axis if axis >= 0 else len(sizes) + axis + 1
    end = len(sizes) if count == -1 else start + count
    own = sizes[start:end]
    chosen = [own[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape([*sizes[:start], *chosen, *sizes[end:]])


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return ``x`` with its dimensions in an order; those that it leaves out come behind."""
    return x.permute([*order, *[axis for axis in range(x.dim()) if axis not in order]])


def slice_parts(x: Tensor, axis: int, points: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """Return parts of ``x`` between points along ``axis``, or ``count`` equal ones."""
    return torch.tensor_split(x, list(points) if points else count, axis)


def crop(x: Tensor, like: Tensor, axis: int, offsets: Sequence[int]) -> Tensor:
    """Return the part of ``x`` that has the sizes of ``like`` from ``axis`` on."""
    axes = range(axis % x.dim(), x.dim())
    starts = list(offsets) * len(axes) if len(offsets) == 1 else list(offsets) or [0] * len(axes)
    for place, start in zip(axes, starts, strict=True):
        x = x.narrow(place, start, like.shape[place])
    return x


def interpolate(
    x: Tensor, like: Tensor | None, size: Sequence[int], factors: Sequence[int], pads: Sequence[int]
) -> Tensor:
    """Return images resized bilinearly, with their corners kept in place.

    The size is that of ``like``, or ``size``, or the old one with pads (not positive), less 1
    divided by the first factor and multiplied by the second.
    """
    before, behind = pads
    height, width = (n + before + behind for n in x.shape[2:])
    x = F.pad(x, [before, behind, before, behind])
    shrink, zoom = factors
    if like is not None:
        new = list(like.shape[2:])
    elif all(size):
        new = list(size)
    else:
        new = [((n - 1) // shrink + 1) for n in (height, width)]
        new = [n + (n - 1) * (zoom - 1) for n in new]
    return F.interpolate(x, new, mode="bilinear", align_corners=True)


operator("Crop", crop, "crop_param", ("integer", "axis", 2), ("integers", "offset"))
operator("ShuffleChannel", F.channel_shuffle, "shuffle_channel_param", ("integer", "group", 1))
