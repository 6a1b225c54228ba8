"""Resizing, sampling, and the boxes of detectors."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import non_max_suppression, write_operator
from torchq.frontends.building.graph import Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NodeContext, converter


class ResizeOptions(NamedTuple):
    """The attributes of the ONNX operator Resize; see there."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    extrapolation: float = 0.0
    antialias: bool = False


_OPTIONS = {"coordinates": "coordinate_transformation_mode", "nearest": "nearest_mode"}
_OPTIONS |= {"cubic_a": "cubic_coeff_a", "extrapolation": "extrapolation_value"}


@converter("Resize")
def _resize(node: NodeContext) -> Value:
    defaults = ResizeOptions()._asdict().items()
    options = ResizeOptions(
        *(node.attr(_OPTIONS.get(name, name), default) for name, default in defaults)
    )
    scales = node.constant(2)
    sizes = None
    factors: object = scales.tolist() if scales is not None and scales.numel() else None
    if factors is None and node.input(3) is not None:
        sizes = node.ints_or_input(3)
    elif factors is None:
        factors = node.input(2)
    axes = node.attr("axes", list | None)
    if axes is None:
        factors_or_sizes = factors or sizes
        axes = list(
            range(
                len(factors_or_sizes)
                if isinstance(factors_or_sizes, list)
                else node.ndim(0)
            )
        )
    policy = node.attr("keep_aspect_ratio_policy", "stretch")
    simple = (
        _as_upsample(node, factors, sizes, axes, options)
        if policy == "stretch"
        else None
    )
    if simple is not None:
        return simple
    roi = node.input(1) if options.coordinates == "tf_crop_and_resize" else None
    return node.call(
        resize, node.inputs[0], factors, sizes, axes, policy, roi, list(options)
    )


def _as_upsample(
    node: NodeContext,
    factors: object,
    sizes: object,
    axes: list[int],
    options: ResizeOptions,
) -> Value:
    """Return a call of torch's own resizing of images where it computes the same, else None."""
    shape, mode = node.shape(0), _torch_mode(options)
    if shape is None or len(shape) != 4 or not node.floating(0) or mode is None:
        return None
    if isinstance(factors, list):
        full = dict.fromkeys(range(4), 1.0) | dict(
            zip([a % 4 for a in axes], factors, strict=True)
        )
        *leading, height, width = full.values()
        if leading != [1, 1] or not all(
            f >= 1 and float(f).is_integer() for f in (height, width)
        ):
            return None
        module = nn.Upsample(
            scale_factor=(height, width), mode=mode[0], align_corners=mode[1]
        )
        return node.module(module, node.inputs[0])
    if not isinstance(sizes, list) or axes not in ([0, 1, 2, 3], [2, 3]):
        return None
    pairs = zip(sizes[:-2], shape, strict=False)
    if any(isinstance(size, int) and size != old_size for size, old_size in pairs):
        return None
    return node.call(F.interpolate, node.inputs[0], sizes[-2:], None, *mode)


def _torch_mode(options: ResizeOptions) -> tuple[str, bool | None] | None:
    """Return mode and ``align_corners`` of ``F.interpolate``, None where torch has no such mode."""
    if options.mode == "nearest":
        same = options.coordinates == "asymmetric" and options.nearest == "floor"
        return ("nearest", None) if same else None
    corners = {"half_pixel": False, "pytorch_half_pixel": False, "align_corners": True}
    special = options.antialias or options.exclude_outside or options.cubic_a != -0.75
    if special or options.coordinates not in corners:
        return None
    return _MODES[options.mode], corners[options.coordinates]


_MODES = {"linear": "bilinear", "cubic": "bicubic"}


@converter("GridSample")
def _grid_sample(node: NodeContext) -> Value:
    mode = node.attr("mode", "linear")
    mode = _MODES.get(mode, mode)
    if mode == "bicubic" and node.ndim(0) != 4:
        node.refuse("cubic sampling of volumes is not supported")
    padding = node.attr("padding_mode", "zeros")
    align = node.attr("align_corners", False)
    return node.call(F.grid_sample, *node.inputs, mode, padding, align)


@converter("NonMaxSuppression")
def _non_max_suppression(node: NodeContext) -> Value:
    most, limit, score_limit = (node.number(index) for index in (2, 3, 4))
    limits = 0 if most is None else most, 0.0 if limit is None else limit, score_limit
    center = node.attr("center_point_box", False)
    return node.call(non_max_suppression, *node.inputs[:2], *limits, center)


@converter("RoiAlign")
def _roi_align(node: NodeContext) -> Value:
    size = (node.attr("output_height", 1), node.attr("output_width", 1))
    default = "half_pixel" if node.version >= 16 else "output_half_pixel"
    half = node.attr("coordinate_transformation_mode", default) == "half_pixel"
    options = (node.attr("sampling_ratio", 0), node.attr("spatial_scale", 1.0), half)
    return node.call(
        roi_align, *node.inputs, size, *options, node.attr("mode", "avg") == "max"
    )


@one_call
def resize(
    x: Tensor,
    scales: Sequence[float] | Tensor | None,
    sizes: Sequence[int] | Tensor | None,
    axes: Sequence[int],
    policy: str,
    roi: Tensor | None,
    options: Sequence[Any],
) -> Tensor:
    """Return ``x`` resized along ``axes``, one axis after the other.

    ``roi`` holds (2 * axes,) normalised bounds, ``options`` the fields of :class:`ResizeOptions`.
    """
    settings = ResizeOptions(*options)
    sizes_before = [x.shape[axis] for axis in axes]
    crops = roi is not None
    if sizes is not None:
        new_sizes = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
        factors = [w / n for w, n in zip(new_sizes, sizes_before, strict=True)]
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * len(
                sizes_before
            )
            new_sizes = [
                math.floor(f * n + 0.5)
                for f, n in zip(factors, sizes_before, strict=True)
            ]
    else:
        assert scales is not None
        factors = scales.tolist() if isinstance(scales, Tensor) else list(scales)
        new_sizes = [
            math.floor(n * factor)
            for n, factor in zip(sizes_before, factors, strict=True)
        ]
    bounds = [0.0] * len(axes) + [1.0] * len(axes) if roi is None else roi.tolist()
    for place, axis in enumerate(axes):
        if new_sizes[place] != sizes_before[place] or factors[place] != 1.0 or crops:
            span = bounds[place], bounds[len(axes) + place]
            x = _resize_axis(x, axis, new_sizes[place], factors[place], span, settings)
    return x


def _coordinates(
    count: int,
    size: int,
    factor: float,
    span: tuple[float, float],
    options: ResizeOptions,
) -> Tensor:
    """Return where each new element lies in the old axis."""
    at = torch.arange(count, dtype=torch.float64)
    length = factor * size
    mode = options.coordinates
    if mode == "align_corners":
        return at * (size - 1) / (length - 1) if length != 1 else torch.zeros_like(at)
    if mode == "asymmetric":
        return at / factor
    if mode == "tf_crop_and_resize":
        if count > 1:
            return span[0] * (size - 1) + at * (span[1] - span[0]) * (size - 1) / (
                length - 1
            )
        return torch.full_like(at, 0.5 * (span[0] + span[1]) * (size - 1))
    if mode == "pytorch_half_pixel" and count == 1:
        return torch.full_like(at, -0.5)
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - count / length) + (at + 0.5) / factor - 0.5
    return (at + 0.5) / factor - 0.5


def _resize_axis(
    x: Tensor,
    axis: int,
    count: int,
    factor: float,
    span: tuple[float, float],
    options: ResizeOptions,
) -> Tensor:
    size = x.shape[axis]
    where = _coordinates(count, size, factor, span, options)
    if options.mode == "nearest":
        places = _nearest(where, options.nearest).clamp(0, size - 1).long().to(x.device)
        y = x.index_select(axis, places)
    else:
        places, weights = _taps(where, size, factor, options)
        wide = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
        matrix = torch.zeros(count, size, dtype=torch.float64)
        matrix.scatter_add_(1, places, weights)
        y = torch.movedim(wide, axis, -1) @ matrix.to(wide).t()
        y = torch.movedim(y, -1, axis).to(x.dtype)
    if options.coordinates != "tf_crop_and_resize":
        return y
    outside = ((where < 0) | (where > size - 1)).to(x.device)
    shape = [1] * x.dim()
    shape[axis] = count
    return torch.where(
        outside.view(shape), torch.tensor(options.extrapolation, dtype=x.dtype), y
    )


def _nearest(where: Tensor, mode: str) -> Tensor:
    if mode in ("floor", "ceil"):
        return where.floor() if mode == "floor" else where.ceil()
    return (
        (where + 0.5).floor() if mode == "round_prefer_ceil" else (where - 0.5).ceil()
    )


def _taps(
    where: Tensor, size: int, factor: float, options: ResizeOptions
) -> tuple[Tensor, Tensor]:
    """Return for each new element the old elements that it is made of, and their weights."""
    scale = min(factor, 1.0) if options.antialias else 1.0
    reach = 1.0 if options.mode == "linear" else 2.0
    half = math.ceil(reach / scale)
    base = where.floor()
    offsets = torch.arange(-half + 1, half + 1, dtype=torch.float64)
    places = base.unsqueeze(1) + offsets
    distance = (places - where.unsqueeze(1)).abs() * scale
    if options.mode == "linear":
        weights = (1 - distance).clamp(min=0)
    else:
        weights = _cubic(distance, options.cubic_a)
    inside = (places >= 0) & (places <= size - 1)
    if options.exclude_outside:
        weights = torch.where(inside, weights, 0.0)
    if options.exclude_outside or options.antialias:
        weights = weights / weights.sum(1, keepdim=True)
    return places.clamp(0, size - 1).long(), weights


def _cubic(d: Tensor, a: float) -> Tensor:
    """Return Keys' cubic convolution kernel (1981, equation 4) at distances."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))


@one_call
def roi_align(
    x: Tensor,
    rois: Tensor,
    batches: Tensor,
    size: tuple[int, int],
    ratio: int,
    scale: float,
    half_pixel: bool,
    largest: bool,
) -> Tensor:
    """Return regions of feature maps resampled to one size (Mask R-CNN, He et al. 2017, 3).

    ``rois`` are (regions, 4) as x1, y1, x2, y2; a ratio of 0 takes as many samples as fit.
    """
    if torch.onnx.is_in_onnx_export():
        options = {
            "output_height": size[0],
            "output_width": size[1],
            "sampling_ratio": ratio,
            "spatial_scale": float(scale),
            "mode": "max" if largest else "avg",
            "coordinate_transformation_mode": "half_pixel"
            if half_pixel
            else "output_half_pixel",
        }
        shape = (rois.shape[0], x.shape[1], *size)
        example = x.new_zeros(shape) if torch.jit.is_tracing() else None
        return write_operator(
            "RoiAlign", 16, [x, rois, batches], options, shape, x.dtype, example
        )
    rois = rois * scale - (0.5 if half_pixel else 0.0)
    images = zip(rois, batches, strict=True)
    results = [
        _align_one(x[int(b)], roi, size, ratio, half_pixel, largest)
        for roi, b in images
    ]
    return torch.stack(results) if results else x.new_zeros(0, x.shape[1], *size)


def _align_one(
    image: Tensor,
    roi: Tensor,
    size: tuple[int, int],
    ratio: int,
    half_pixel: bool,
    largest: bool,
) -> Tensor:
    x1, y1, x2, y2 = roi.tolist()
    width = x2 - x1
    height = y2 - y1
    if not half_pixel:
        width, height = max(width, 1.0), max(height, 1.0)
    (rows, row_weights, ny) = _samples(y1, height, size[0], ratio, image.shape[1])
    (columns, column_weights, nx) = _samples(x1, width, size[1], ratio, image.shape[2])
    corners = [
        image[:, rows[i]][:, :, columns[j]]
        * (weights[:, None] * column_weights[j]).to(image)
        for i, weights in enumerate(row_weights)
        for j in (0, 1)
    ]
    shape = (image.shape[0], size[0], ny, size[1], nx)
    if largest:
        return torch.stack(corners).amax(0).view(shape).amax((2, 4))
    return (corners[0] + corners[1] + corners[2] + corners[3]).view(shape).mean((2, 4))


def _samples(
    start: float, length: float, bins: int, ratio: int, size: int
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return two neighbours and their weights for every sample, and the samples in a bin."""
    count = ratio if ratio > 0 else max(1, math.ceil(length / bins))
    at = start + (torch.arange(bins * count, dtype=torch.float64) + 0.5) * (
        length / bins / count
    )
    outside = (at < -1.0) | (at > size)
    at = at.clamp(min=0)
    low = at.floor().long()
    last = low >= size - 1
    low = torch.where(last, size - 1, low)
    high = torch.where(last, size - 1, low + 1)
    fraction = torch.where(last, 0.0, at - low)
    alive = (~outside).double()
    return [low, high], [(1 - fraction) * alive, fraction * alive], count
