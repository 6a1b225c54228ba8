"""Resizing and sampling of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ResizeOptions:
    """The attributes of the ONNX operator Resize; see there."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    extrapolation: float = 0.0
    antialias: bool = False


def resize(
    x: Tensor,
    scales: Sequence[float] | Tensor | None,
    sizes: Sequence[int] | Tensor | None,
    axes: Sequence[int],
    policy: str,
    roi: Tensor | None,
    options: tuple[str, str, str, float, bool, float, bool],
) -> Tensor:
    """Return ``x`` resized along ``axes``, one axis after the other.

    Args:
        x: any shape.
        scales: for each axis, or None.
        sizes: for each axis, where scales are None.
        axes: the resized ones.
        policy: what keeps the aspect ratio with sizes: ``"stretch"``, ``"not_larger"`` or
            ``"not_smaller"``.
        roi: (2 * axes,) normalised bounds for ``tf_crop_and_resize``.
        options: the fields of :class:`ResizeOptions`.
    """
    settings = ResizeOptions(*options)
    own = [x.shape[axis] for axis in axes]
    if sizes is not None:
        wanted = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
        factors = [w / n for w, n in zip(wanted, own, strict=True)]
        if policy != "stretch":
            factor = min(factors) if policy == "not_larger" else max(factors)
            factors = [factor] * len(own)
            wanted = [math.floor(factor * n + 0.5) for n in own]
    else:
        assert scales is not None
        factors = scales.tolist() if isinstance(scales, Tensor) else list(scales)
        wanted = [math.floor(n * factor) for n, factor in zip(own, factors, strict=True)]
    bounds = None if roi is None else roi.tolist()
    for place, axis in enumerate(axes):
        span = (0.0, 1.0) if bounds is None else (bounds[place], bounds[len(axes) + place])
        crops = settings.coordinates == "tf_crop_and_resize"
        if wanted[place] != own[place] or factors[place] != 1.0 or crops:
            x = _resize_axis(x, axis, wanted[place], factors[place], span, settings)
    return x


def _coordinates(
    count: int, size: int, factor: float, span: tuple[float, float], options: ResizeOptions
) -> Tensor:
    """Return where each new element lies in the old axis."""
    at = torch.arange(count, dtype=torch.float64)
    length = factor * size
    mode = options.coordinates
    if mode == "align_corners":
        return (
            at * (size - 1) / (length - 1)
            if length != 1
            else torch.zeros(count, dtype=torch.float64)
        )
    if mode == "asymmetric":
        return at / factor
    if mode == "tf_crop_and_resize":
        if count > 1:
            return span[0] * (size - 1) + at * (span[1] - span[0]) * (size - 1) / (length - 1)
        return torch.full((count,), 0.5 * (span[0] + span[1]) * (size - 1), dtype=torch.float64)
    if mode == "pytorch_half_pixel" and count == 1:
        return torch.full((count,), -0.5, dtype=torch.float64)
    if mode == "half_pixel_symmetric":
        adjustment = count / length
        center = size / 2
        return center * (1 - adjustment) + (at + 0.5) / factor - 0.5
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
    return torch.where(outside.view(shape), torch.tensor(options.extrapolation, dtype=x.dtype), y)


def _nearest(where: Tensor, mode: str) -> Tensor:
    if mode == "floor":
        return where.floor()
    if mode == "ceil":
        return where.ceil()
    if mode == "round_prefer_ceil":
        return (where + 0.5).floor()
    return (where - 0.5).ceil()


def _taps(where: Tensor, size: int, factor: float, options: ResizeOptions) -> tuple[Tensor, Tensor]:
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


def grid_sample(x: Tensor, grid: Tensor, mode: str, padding: str, align: bool) -> Tensor:
    """Return values of images at normalised positions."""
    return F.grid_sample(x, grid, mode, padding, align)
