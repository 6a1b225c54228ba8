"""Shapes, slices, joins and resizing."""

from __future__ import annotations

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.caffe.functions import movement
from torchq.frontends.caffe.node import CaffeLayer
from torchq.frontends.caffe.registry import converter


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
    return layer.call_parts(count, movement.slice_parts, layer.inputs[0], axis, points, count)


@converter("Flatten")
def _flatten(layer: CaffeLayer) -> Value:
    settings = layer.settings("flatten_param")
    start, end = settings.integer("axis", 1), settings.integer("end_axis", -1)
    if (start, end) == (1, -1):
        layer.result_ndim = 2
        return layer.module(nn.Flatten(), layer.inputs[0])
    ndim = layer.ndims[0]
    layer.result_ndim = None if ndim is None else ndim - (end % ndim - start % ndim)
    return layer.call(movement.flatten, layer.inputs[0], start, end)


@converter("Reshape")
def _reshape(layer: CaffeLayer) -> Value:
    settings = layer.settings("reshape_param")
    shape = settings.settings("shape").integers("dim")
    axis, count = settings.integer("axis", 0), settings.integer("num_axes", -1)
    layer.result_ndim = len(shape) if (axis, count) == (0, -1) else None
    return layer.call(movement.reshape, layer.inputs[0], shape, axis, count)


@converter("Permute")
def _permute(layer: CaffeLayer) -> Value:
    order = layer.settings("permute_param").integers("order")
    if layer.ndims[0] == len(order):
        return layer.call(torch.permute, layer.inputs[0], order)
    return layer.call(movement.permute, layer.inputs[0], order)


@converter("Crop")
def _crop(layer: CaffeLayer) -> Value:
    settings = layer.settings("crop_param")
    axis, offsets = settings.integer("axis", 2), settings.integers("offset")
    return layer.call(movement.crop, layer.inputs[0], layer.inputs[1], axis, offsets)


@converter("Tile")
def _tile(layer: CaffeLayer) -> Value:
    settings = layer.settings("tile_param")
    axis, count = settings.integer("axis", 1), settings.integer("tiles")
    return layer.call(movement.tile, layer.inputs[0], axis, count)


@converter("ShuffleChannel")
def _shuffle(layer: CaffeLayer) -> Value:
    groups = layer.settings("shuffle_channel_param").integer("group", 1)
    return layer.call(movement.shuffle_channels, layer.inputs[0], groups)


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
    return layer.call(movement.interpolate, layer.inputs[0], like, size, factors, pads)
