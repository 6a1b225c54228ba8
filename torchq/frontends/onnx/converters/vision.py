"""Resizing, sampling, and the boxes of detectors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.building.suppression import non_max_suppression
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions import boxes, vision
from torchq.frontends.onnx.registry import converter


@converter("Resize")
def _resize(node: NodeContext) -> Value:
    options = vision.ResizeOptions(
        node.attr("mode", "nearest"),
        node.attr("coordinate_transformation_mode", "half_pixel"),
        node.attr("nearest_mode", "round_prefer_floor"),
        node.attr("cubic_coeff_a", -0.75),
        bool(node.attr("exclude_outside", 0)),
        node.attr("extrapolation_value", 0.0),
        bool(node.attr("antialias", 0)),
    )
    scales = node.constant(2)
    sizes: Any = None
    factors: Any = scales.tolist() if scales is not None and scales.numel() else None
    if factors is None and node.input(3) is not None:
        sizes = node.ints(3) if node.ints(3) is not None else node.inputs[3]
    elif factors is None:
        factors = node.input(2)
    axes = node.attr("axes")
    if axes is None:
        given = factors or sizes
        axes = list(range(len(given) if isinstance(given, list) else node.ndim(0)))
    return _resized(node, factors, sizes, list(axes), options)


def _resized(
    node: NodeContext, factors: Any, sizes: Any, axes: list[int], options: vision.ResizeOptions
) -> Value:
    simple = _as_upsample(node, factors, sizes, axes, options)
    if simple is not None:
        return simple
    policy = node.attr("keep_aspect_ratio_policy", "stretch")
    roi = node.input(1) if options.coordinates == "tf_crop_and_resize" else None
    values = dataclasses.astuple(options)
    return node.call(vision.resize, node.inputs[0], factors, sizes, axes, policy, roi, values)


def _as_upsample(
    node: NodeContext, factors: Any, sizes: Any, axes: list[int], options: vision.ResizeOptions
) -> Value:
    """Return a call of torch's own resizing of images where it computes the same, else None."""
    shape = node.shape(0)
    if (
        shape is None
        or len(shape) != 4
        or not node.floating(0)
        or node.attr("keep_aspect_ratio_policy", "stretch") != "stretch"
    ):
        return None
    mode = _torch_mode(options)
    if mode is None or options.antialias or options.exclude_outside:
        return None
    if isinstance(factors, list):
        full = dict(zip((axis % 4 for axis in axes), factors, strict=True))
        if full.get(0, 1.0) != 1.0 or full.get(1, 1.0) != 1.0:
            return None
        pair = (full.get(2, 1.0), full.get(3, 1.0))
        if all(float(f).is_integer() for f in pair) and min(pair) >= 1:
            module = nn.Upsample(scale_factor=pair, mode=mode[0], align_corners=mode[1])
            return node.module(module, node.inputs[0])
        return None
    if not isinstance(sizes, list) or axes not in ([0, 1, 2, 3], [2, 3]):
        return None
    size = sizes[-2:]
    if len(sizes) == 4 and any(
        isinstance(s, int) and s != n for s, n in zip(sizes[:2], shape[:2], strict=True)
    ):
        return None
    return node.call(F.interpolate, node.inputs[0], list(size), None, mode[0], mode[1])


def _torch_mode(options: vision.ResizeOptions) -> tuple[str, bool | None] | None:
    """Return mode and ``align_corners`` of ``F.interpolate``, None where torch has no such mode."""
    if options.mode == "nearest":
        same = options.coordinates == "asymmetric" and options.nearest == "floor"
        return ("nearest", None) if same else None
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(options.mode)
    if name is None or (name == "bicubic" and options.cubic_a != -0.75):
        return None
    if options.coordinates in ("half_pixel", "pytorch_half_pixel"):
        return name, False
    return (name, True) if options.coordinates == "align_corners" else None


@converter("GridSample")
def _grid_sample(node: NodeContext) -> Value:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        node.attr("mode", "linear"), node.attr("mode", "linear")
    )
    if mode == "bicubic" and node.ndim(0) != 4:
        node.refuse("cubic sampling of volumes is not supported")
    padding, align = node.attr("padding_mode", "zeros"), bool(node.attr("align_corners", 0))
    return node.call(vision.grid_sample, *node.inputs, mode, padding, align)


@converter("NonMaxSuppression")
def _non_max_suppression(node: NodeContext) -> Value:
    numbers = [_number(node, index) for index in (2, 3, 4)]
    most = 0 if numbers[0] is None else numbers[0]
    limit = 0.0 if numbers[1] is None else numbers[1]
    center = bool(node.attr("center_point_box", 0))
    arguments = (*node.inputs[:2], most, limit, numbers[2], center)
    return node.call(non_max_suppression, *arguments)


def _number(node: NodeContext, index: int) -> Any:
    """Return an input of one number as a number where it is known, else as it is."""
    known = node.constant(index)
    return node.input(index) if known is None else known.reshape(-1)[0].item()


@converter("RoiAlign")
def _roi_align(node: NodeContext) -> Value:
    size = (node.attr("output_height", 1), node.attr("output_width", 1))
    default = "half_pixel" if node.version >= 16 else "output_half_pixel"
    half = node.attr("coordinate_transformation_mode", default) == "half_pixel"
    options = (node.attr("sampling_ratio", 0), node.attr("spatial_scale", 1.0), half)
    return node.call(
        boxes.roi_align, *node.inputs, size, *options, node.attr("mode", "avg") == "max"
    )
