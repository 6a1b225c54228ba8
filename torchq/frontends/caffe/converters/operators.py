"""Arithmetic, norms, shapes, slices, joins and resizing."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.caffe.node import CaffeLayer, converter, row

_ELTWISE: dict[str, Callable[..., Tensor]] = {
    "PROD": torch.mul,
    "SUM": torch.add,
    "MAX": torch.maximum,
}


@converter("Eltwise", about="eltwise_param")
def _eltwise(layer: CaffeLayer) -> Value:
    given = layer.settings.has("operation")
    factors = layer.settings.numbers("coeff")
    kind = layer.settings.choice("operation", "PROD", "SUM", "MAX") if given else "SUM"
    layer.attr("stable_prod_grad", True)
    if kind == "SUM" and any(factor != 1 for factor in factors):
        if len(factors) != len(layer.inputs):
            layer.refuse(f"got {len(factors)} factors for {len(layer.inputs)} inputs")
        return layer.call(weighted_sum, list(layer.inputs), factors)
    return functools.reduce(lambda a, b: layer.call(_ELTWISE[kind], a, b), layer.inputs)


@converter("Scale", about="scale_param")
def _scale(layer: CaffeLayer) -> Value:
    axis = layer.attr("axis", 1)
    with_bias = layer.attr("bias_term", False)
    given = layer.input(1)
    layer.attr("num_axes", 1)
    scale = layer.blob(0, "weight") if given is None else given
    bias = layer.blob(1 if given is None else 0, "bias") if with_bias else None
    return layer.call(affine, layer.inputs[0], scale, bias, axis)


@converter("Axpy")
def _axpy(layer: CaffeLayer) -> Value:
    scale, x, y = layer.inputs
    layer.result_ndim = layer.ndims[1]
    return layer.call(torch.add, layer.call(torch.mul, x, scale), y)


@converter("LRN", about="lrn_param")
def _local_response(layer: CaffeLayer) -> Value:
    size = layer.attr("local_size", 5)
    alpha = layer.attr("alpha", 1.0)
    beta = layer.attr("beta", 0.75)
    k = layer.attr("k", 1.0)
    region = layer.settings.choice("norm_region", "ACROSS_CHANNELS", "WITHIN_CHANNEL")
    if size % 2 == 0:
        layer.refuse(f"local_size is {size}; expected an odd number")
    if region == "WITHIN_CHANNEL":
        return layer.call(within_channel, layer.inputs[0], size, alpha, beta)
    return layer.module(nn.LocalResponseNorm(size, alpha, beta, k), layer.inputs[0])


@converter("Normalize", about="norm_param")
def _normalize(layer: CaffeLayer) -> Value:
    options = layer.attr("across_spatial", True), layer.attr("eps", 1e-10)
    layer.attr("channel_shared", True)
    return layer.call(normalize, layer.inputs[0], layer.vector(0, "weight"), *options)


@converter("ArgMax", about="argmax_param")
def _arg_max(layer: CaffeLayer) -> Value:
    if layer.attr("top_k", 1) != 1 or layer.attr("out_max_val", False):
        layer.refuse("more than the place of the largest element is not supported")
    return layer.call(arg_max, layer.inputs[0], layer.attr("axis", int))


def along(part: Tensor, ndim: int, axis: int) -> Tensor:
    """Return a tensor whose dimensions line up with those from ``axis`` on of a larger one."""
    behind = ndim - axis % ndim - part.dim()
    return part.reshape((*part.shape, *[1] * behind))


@one_call
def affine(x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int) -> Tensor:
    """Return ``x * scale + bias``, both lined up with the dimensions of ``x`` from ``axis`` on."""
    if scale is not None:
        x = x * along(scale, x.dim(), axis)
    return x if bias is None else x + along(bias, x.dim(), axis)


@one_call
def weighted_sum(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of tensors, each times its factor."""
    total = tensors[0] * factors[0]
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        total = total + tensor * factor
    return total


@one_call
def power(x: Tensor, power: float, scale: float, shift: float) -> Tensor:
    """Return ``(shift + scale * x) ** power``."""
    y = x if scale == 1 else x * scale
    y = y if shift == 0 else y + shift
    return y if power == 1 else y**power


@one_call
def exponential(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """Return ``base ** (shift + scale * x)``; a base of -1 stands for e."""
    inner = shift + scale * x
    return torch.exp(inner) if base == -1 else torch.pow(base, inner)


@one_call
def mean_variance(x: Tensor, variance: bool, across: bool, eps: float) -> Tensor:
    """Return channels, or whole samples, with mean 0, and with variance 1 if asked for."""
    axes = list(range(1 if across else 2, x.dim()))
    y = x - x.mean(axes, keepdim=True)
    if not variance:
        return y
    return y / ((y * y).mean(axes, keepdim=True).sqrt() + eps)


@one_call
def within_channel(x: Tensor, size: int, alpha: float, beta: float) -> Tensor:
    """Return ``x`` divided by a power of the mean square around each place."""
    squares = F.avg_pool2d(x * x, size, 1, (size - 1) // 2)
    return x * (1 + alpha * squares) ** -beta


@one_call
def normalize(x: Tensor, scale: Tensor, across_spatial: bool, eps: float) -> Tensor:
    """Return ``x`` divided by its norm over each sample, or each place, then scaled."""
    axes = list(range(1, x.dim())) if across_spatial else [1]
    y = x / torch.sqrt((x * x).sum(axes, keepdim=True) + eps)
    return y * along(scale, x.dim(), 1)


@one_call
def arg_max(x: Tensor, axis: int) -> Tensor:
    """Return the places of the largest elements along an axis as numbers."""
    return x.argmax(axis, keepdim=True).to(x.dtype)


row("AbsVal", torch.abs)
row("Power", power, about="power_param", power=1.0, scale=1.0, shift=0.0)
row("Exp", exponential, about="exp_param", base=-1.0, scale=1.0, shift=0.0)
_VARIANCE = {"normalize_variance": True, "across_channels": False, "eps": 1e-9}
row("MVN", mean_variance, about="mvn_param", **_VARIANCE)
row("Clip", torch.clamp, about="clip_param", min=float, max=float)


@converter("Split")
def _split(layer: CaffeLayer) -> list[Value]:
    return [layer.inputs[0]] * len(layer.layer.tops)


@converter("Concat", about="concat_param")
def _concat(layer: CaffeLayer) -> Value:
    axis = layer.attr("axis", layer.attr("concat_dim", 1))
    several = len(layer.inputs) > 1
    return (
        layer.call(torch.cat, list(layer.inputs), axis) if several else layer.inputs[0]
    )


@converter("Slice", about="slice_param")
def _slice(layer: CaffeLayer) -> list[Value]:
    axis = layer.attr("axis", layer.attr("slice_dim", 1))
    points = layer.attr("slice_point", [])
    count = len(layer.layer.tops)
    if points and len(points) != count - 1:
        layer.refuse(f"got {len(points)} slice points for {count} outputs")
    return layer.call_parts(
        count, torch.tensor_split, layer.inputs[0], points or count, axis
    )


@converter("Flatten", about="flatten_param")
def _flatten(layer: CaffeLayer) -> Value:
    start = layer.attr("axis", 1)
    end = layer.attr("end_axis", -1)
    ndim = layer.ndims[0]
    if (start, end) == (1, -1):
        layer.result_ndim = 2
        return layer.module(nn.Flatten(), layer.inputs[0])
    layer.result_ndim = None if ndim is None else ndim - (end % ndim - start % ndim)
    return layer.call(torch.flatten, layer.inputs[0], start, end)


@converter("Reshape", about="reshape_param")
def _reshape(layer: CaffeLayer) -> Value:
    shape = layer.settings.settings("shape").attr("dim", [])
    axis = layer.attr("axis", 0)
    count = layer.attr("num_axes", -1)
    layer.result_ndim = len(shape) if (axis, count) == (0, -1) else None
    return layer.call(reshape, layer.inputs[0], shape, axis, count)


@converter("Permute", about="permute_param")
def _permute(layer: CaffeLayer) -> Value:
    order = layer.attr("order", [])
    function = torch.permute if layer.ndims[0] == len(order) else permute
    return layer.call(function, layer.inputs[0], order)


@converter("Upsample", about="upsample_param")
def _upsample(layer: CaffeLayer) -> Value:
    if len(layer.inputs) != 1:
        layer.refuse("it reads the places of a pooling, which is not supported")
    scale = layer.attr("scale", 2)
    return layer.module(
        nn.Upsample(scale_factor=scale, mode="nearest"), layer.inputs[0]
    )


@converter("Interp", about="interp_param")
def _interp(layer: CaffeLayer) -> Value:
    size = [layer.attr("height", 0), layer.attr("width", 0)]
    factors = [layer.attr("shrink_factor", 1), layer.attr("zoom_factor", 1)]
    pads = [layer.attr("pad_beg", 0), layer.attr("pad_end", 0)]
    if max(pads) > 0 or min(factors) < 1:
        layer.refuse(
            f"got pads {pads} and factors {factors}; expected crops, and factors above 0"
        )
    return layer.call(interpolate, layer.inputs[0], layer.input(1), size, factors, pads)


@one_call
def reshape(x: Tensor, shape: Sequence[int], axis: int, count: int) -> Tensor:
    """Return ``x`` with ``count`` sizes (-1: all) replaced; 0 keeps a size, -1 is the rest."""
    sizes = list(x.shape)
    start = axis if axis >= 0 else len(sizes) + axis + 1
    end = len(sizes) if count == -1 else start + count
    replaced_sizes = sizes[start:end]
    chosen = [replaced_sizes[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape([*sizes[:start], *chosen, *sizes[end:]])


@one_call
def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return ``x`` with its dimensions in an order; those that it leaves out come behind."""
    return x.permute([*order, *[axis for axis in range(x.dim()) if axis not in order]])


@one_call
def crop(x: Tensor, like: Tensor, axis: int, offsets: Sequence[int]) -> Tensor:
    """Return the part of ``x`` that has the sizes of ``like`` from ``axis`` on."""
    axes = range(axis % x.dim(), x.dim())
    starts = (
        list(offsets) * len(axes)
        if len(offsets) == 1
        else list(offsets) or [0] * len(axes)
    )
    for place, start in zip(axes, starts, strict=True):
        x = x.narrow(place, start, like.shape[place])
    return x


@one_call
def interpolate(
    x: Tensor,
    like: Tensor | None,
    size: Sequence[int],
    factors: Sequence[int],
    pads: Sequence[int],
) -> Tensor:
    """Return images of a size, or (old + pads - 1) / shrink * zoom, with corners in place."""
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


row("Crop", crop, about="crop_param", axis=2, offset=[])
row("ShuffleChannel", F.channel_shuffle, about="shuffle_channel_param", group=1)
