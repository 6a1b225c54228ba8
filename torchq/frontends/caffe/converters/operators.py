"""Arithmetic, norms, shapes, slices, joins and resizing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Value
from torchq.frontends.caffe.node import CaffeLayer, converter, operator

_ELTWISE: dict[str, Callable[..., Tensor]] = {
    "PROD": torch.mul,
    "SUM": torch.add,
    "MAX": torch.maximum,
}


@converter("Eltwise")
def _eltwise(layer: CaffeLayer) -> Value:
    settings = layer.settings("eltwise_param")
    kind = (
        settings.choice("operation", "PROD", "SUM", "MAX") if settings.has("operation") else "SUM"
    )
    factors = settings.numbers("coeff")
    settings.flag("stable_prod_grad", True)
    if kind == "SUM" and any(factor != 1 for factor in factors):
        if len(factors) != len(layer.inputs):
            layer.refuse(f"got {len(factors)} factors for {len(layer.inputs)} inputs")
        return layer.call(weighted_sum, list(layer.inputs), factors)
    return functools.reduce(lambda a, b: layer.call(_ELTWISE[kind], a, b), layer.inputs)


@converter("Scale")
def _scale(layer: CaffeLayer) -> Value:
    settings = layer.settings("scale_param")
    axis, with_bias = settings.integer("axis", 1), settings.flag("bias_term", False)
    settings.integer("num_axes", 1)
    given = len(layer.inputs) > 1
    scale = layer.inputs[1] if given else layer.blob(0, "weight")
    bias = layer.blob(0 if given else 1, "bias") if with_bias else None
    return layer.call(affine, layer.inputs[0], scale, bias, axis)


@converter("Axpy")
def _axpy(layer: CaffeLayer) -> Value:
    scale, x, y = layer.inputs
    layer.result_ndim = layer.ndims[1]
    return layer.call(torch.add, layer.call(torch.mul, x, scale), y)


@converter("LRN")
def _local_response(layer: CaffeLayer) -> Value:
    settings = layer.settings("lrn_param")
    size, alpha = settings.integer("local_size", 5), settings.number("alpha", 1.0)
    beta, k = settings.number("beta", 0.75), settings.number("k", 1.0)
    region = settings.choice("norm_region", "ACROSS_CHANNELS", "WITHIN_CHANNEL")
    if size % 2 == 0:
        layer.refuse(f"local_size is {size}; expected an odd number")
    if region == "WITHIN_CHANNEL":
        return layer.call(within_channel, layer.inputs[0], size, alpha, beta)
    return layer.module(nn.LocalResponseNorm(size, alpha, beta, k), layer.inputs[0])


@converter("Normalize")
def _normalize(layer: CaffeLayer) -> Value:
    settings = layer.settings("norm_param")
    across, eps = settings.flag("across_spatial", True), settings.number("eps", 1e-10)
    settings.flag("channel_shared", True)
    return layer.call(normalize, layer.inputs[0], layer.vector(0, "weight"), across, eps)


@converter("ArgMax")
def _arg_max(layer: CaffeLayer) -> Value:
    settings = layer.settings("argmax_param")
    if settings.integer("top_k", 1) != 1 or settings.flag("out_max_val", False):
        layer.refuse("more than the place of the largest element is not supported")
    return layer.call(arg_max, layer.inputs[0], settings.integer("axis"))


def along(part: Tensor, ndim: int, axis: int) -> Tensor:
    """Return a tensor whose dimensions line up with those from ``axis`` on of a larger one."""
    behind = ndim - axis % ndim - part.dim()
    return part.reshape((*part.shape, *[1] * behind))


def affine(x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int) -> Tensor:
    """Return ``x * scale + bias``, both lined up with the dimensions of ``x`` from ``axis`` on."""
    if scale is not None:
        x = x * along(scale, x.dim(), axis)
    return x if bias is None else x + along(bias, x.dim(), axis)


def weighted_sum(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of tensors, each times its factor."""
    total = tensors[0] * factors[0]
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        total = total + tensor * factor
    return total


def power(x: Tensor, power: float, scale: float, shift: float) -> Tensor:
    """Return ``(shift + scale * x) ** power``."""
    y = x if scale == 1 else x * scale
    y = y if shift == 0 else y + shift
    return y if power == 1 else y**power


def exponential(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """Return ``base ** (shift + scale * x)``; a base of -1 stands for e."""
    inner = shift + scale * x
    return torch.exp(inner) if base == -1 else torch.pow(base, inner)


def mean_variance(x: Tensor, variance: bool, across: bool, eps: float) -> Tensor:
    """Return channels, or whole samples, with mean 0, and with variance 1 if asked for."""
    axes = list(range(1 if across else 2, x.dim()))
    y = x - x.mean(axes, keepdim=True)
    if not variance:
        return y
    return y / ((y * y).mean(axes, keepdim=True).sqrt() + eps)


def within_channel(x: Tensor, size: int, alpha: float, beta: float) -> Tensor:
    """Return ``x`` divided by a power of the mean square around each place."""
    squares = F.avg_pool2d(x * x, size, 1, (size - 1) // 2)
    return x * (1 + alpha * squares) ** -beta


def normalize(x: Tensor, scale: Tensor, across_spatial: bool, eps: float) -> Tensor:
    """Return ``x`` divided by its norm over each sample, or each place, then scaled."""
    axes = list(range(1, x.dim())) if across_spatial else [1]
    y = x / torch.sqrt((x * x).sum(axes, keepdim=True) + eps)
    return y * along(scale, x.dim(), 1)


def arg_max(x: Tensor, axis: int) -> Tensor:
    """Return the places of the largest elements along an axis as numbers."""
    return x.argmax(axis, keepdim=True).to(x.dtype)


_INNER = (("number", "scale", 1.0), ("number", "shift", 0.0))
_VARIANCE = (("flag", "normalize_variance", True), ("flag", "across_channels", False))
operator("AbsVal", torch.abs)
operator("Power", power, "power_param", ("number", "power", 1.0), *_INNER)
operator("Exp", exponential, "exp_param", ("number", "base", -1.0), *_INNER)
operator("MVN", mean_variance, "mvn_param", *_VARIANCE, ("number", "eps", 1e-9))
operator("Clip", torch.clamp, "clip_param", ("number", "min"), ("number", "max"))


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
