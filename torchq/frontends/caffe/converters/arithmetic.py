"""Arithmetic and norms."""

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
