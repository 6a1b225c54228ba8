"""Convolutions, inner products, pooling and activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchq.frontends.building.functions import pool
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    POOLS,
    convolution,
    filled,
)
from torchq.frontends.caffe.node import CaffeLayer, Settings, converter


def sizes(
    layer: CaffeLayer, settings: Settings, spatial: int, repeated: str, pair: str, default: int
) -> list[int]:
    """Return one size for each dimension of a window."""
    named = [f"{pair}_h", f"{pair}_w"]
    if any(settings.has(name) for name in named):
        if spatial != 2:
            layer.refuse(f"got {named[0]} for {spatial} dimensions; expected {repeated}")
        return [settings.integer(name, default if default >= 0 else None) for name in named]
    found = settings.integers(repeated) or ([default] if default >= 0 else [])
    if len(found) == 1:
        found = found * spatial
    if len(found) != spatial:
        layer.refuse(f"{repeated} is {found}; expected {spatial} sizes")
    return found


@converter(
    "Convolution", "Deconvolution", "DepthwiseConvolution", "ConvolutionDepthwise", "ConvolutionDW"
)
def _convolution(layer: CaffeLayer) -> Value:
    settings = layer.settings("convolution_param")
    transposed = layer.op_type == "Deconvolution"
    weight = layer.blob(0, "weight")
    spatial = weight.tensor.dim() - 2
    if spatial not in CONVOLUTIONS or settings.integer("axis", 1) != 1:
        layer.refuse(f"its weight has {spatial} spatial dimensions; expected 1 to 3, and axis 1")
    kernel = sizes(layer, settings, spatial, "kernel_size", "kernel", -1)
    stride = sizes(layer, settings, spatial, "stride", "stride", 1)
    pad = sizes(layer, settings, spatial, "pad", "pad", 0)
    dilation = sizes(layer, settings, spatial, "dilation", "dilation", 1)
    out, with_bias = settings.integer("num_output"), settings.flag("bias_term", True)
    groups = settings.integer("group", 1)
    if "epthwise" in layer.op_type or layer.op_type == "ConvolutionDW":
        groups = out
    first, second = weight.tensor.shape[:2]
    inputs = first if transposed else second * groups
    expected = [inputs, out // max(groups, 1)] if transposed else [out, second]
    if list(weight.tensor.shape) != [*expected, *kernel]:
        shape = tuple(weight.tensor.shape)
        layer.refuse(f"its weight has the shape {shape}; expected {[*expected, *kernel]}")
    bias = layer.vector(1, "bias", out) if with_bias else None
    window, extra = (stride, pad, dilation), [0] * spatial if transposed else None
    module = convolution(layer.builder, weight, bias, window, groups, extra)
    return layer.module(module, layer.inputs[0])


@converter("InnerProduct")
def _inner_product(layer: CaffeLayer) -> Value:
    settings = layer.settings("inner_product_param")
    out, with_bias = settings.integer("num_output"), settings.flag("bias_term", True)
    axis, weight = layer.axis(settings), layer.blob(0, "weight")
    if weight.tensor.numel() % max(out, 1):
        layer.refuse(f"its weight has the shape {tuple(weight.tensor.shape)} for {out} outputs")
    if settings.flag("transpose", False):
        form = weight.tensor.reshape(-1, out).t()
    else:
        form = weight.tensor.reshape(out, -1)
    x = layer.inputs[0]
    if layer.ndims[0] != axis + 1:
        x = layer.call(torch.flatten, x, axis)
    module = nn.Linear(form.shape[1], out, with_bias, device="meta")
    module.weight = layer.builder.parameter(weight, "matrix", form)
    if with_bias:
        module.bias = layer.builder.parameter(layer.vector(1, "bias", out))
    layer.result_ndim = axis + 1
    return layer.module(module, x)


@converter("BatchNorm")
def _batch_norm(layer: CaffeLayer) -> Value:
    settings = layer.settings("batch_norm_param")
    eps = settings.number("eps", 1e-5)
    if not settings.flag("use_global_stats", True):
        layer.refuse("it uses the statistics of each batch; expected the stored ones")
    mean = layer.vector(0, "running_mean").tensor
    variance = layer.vector(1, "running_var", mean.numel()).tensor
    # The stored sums are divided by the factor that the third blob holds.
    count = float(layer.blob(2, "factor", 1).tensor.reshape(()))
    factor = 0.0 if count == 0 else 1 / count
    mean, variance = mean * factor, variance * factor
    ndim = layer.ndims[0]
    if ndim not in BATCH_NORMS:
        states = (Constant(mean), Constant(variance), None, None, False, 0.0)
        return layer.call(F.batch_norm, layer.inputs[0], *states, eps)
    scale = _mergeable(layer, mean.numel())
    module = BATCH_NORMS[ndim](mean.numel(), eps, affine=scale is not None)
    module.running_mean, module.running_var = mean, variance
    if scale is not None:
        bias = scale.vector(1, "bias", mean.numel()) if len(scale.blobs) > 1 else None
        module.bias = nn.Parameter(torch.zeros_like(mean))
        filled(layer.builder, module, scale.vector(0, "weight"), bias)
        layer.scale_done = True
    return layer.module(module, layer.inputs[0])


def _mergeable(layer: CaffeLayer, channels: int) -> CaffeLayer | None:
    """Return the Scale layer behind a BatchNorm if it has one factor for each channel."""
    scale = layer.scale
    if scale is None or len(scale.layer.bottoms) != 1 or not scale.blobs:
        return None
    settings = scale.settings("scale_param")
    plain = settings.integer("axis", 1) == 1 and settings.integer("num_axes", 1) == 1
    with_bias = settings.flag("bias_term", False)
    scale.check_all_read()
    fits = scale.blobs[0].numel() == channels and len(scale.blobs) == 1 + with_bias
    return scale if plain and fits else None


@converter("Pooling")
def _pooling(layer: CaffeLayer) -> Value:
    settings = layer.settings("pooling_param")
    kind = settings.choice("pool", "MAX", "AVE", "STOCHASTIC")
    if kind == "STOCHASTIC" or len(layer.layer.tops) > 1:
        layer.refuse("stochastic pooling, and the places of maxima, are not supported")
    name = {"MAX": "max", "AVE": "avg"}[kind]
    if settings.flag("global_pooling", False):
        for field in ("kernel_size", "stride", "pad"):
            settings.integers(field)
        return layer.module(GLOBAL_POOLS[name][2](1), layer.inputs[0])
    kernel = sizes(layer, settings, 2, "kernel_size", "kernel", -1)
    stride = sizes(layer, settings, 2, "stride", "stride", 1)
    pad = sizes(layer, settings, 2, "pad", "pad", 0)
    up = settings.choice("round_mode", "CEIL", "FLOOR") == "CEIL"
    up = settings.flag("ceil_mode", up)
    parts = list(zip(kernel, stride, pad, strict=True))
    if any(p >= k for k, _, p in parts):
        layer.refuse(f"pad is {pad}; expected less than the kernel {kernel}")
    # Without padding Caffe keeps a last window that begins behind the input, torch does not.
    outside = up and not any(pad) and any(s > k for k, s, _ in parts)
    if outside or any(2 * p > k for k, _, p in parts):
        if up and any(pad):
            layer.refuse(f"a pad of {pad} with a kernel of {kernel} is not supported")
        convention = "full" if up else "valid"
        window = kernel, stride, [1, 1], pad + pad
        return layer.call(pool, layer.inputs[0], name, *window, convention, True)
    return layer.module(POOLS[name][2](kernel, stride, pad, ceil_mode=up), layer.inputs[0])


_PLAIN = {"Sigmoid": nn.Sigmoid, "TanH": nn.Tanh, "ReLU6": nn.ReLU6, "BNLL": nn.Softplus}


@converter(*_PLAIN)
def _plain(layer: CaffeLayer) -> Value:
    return layer.module(_PLAIN[layer.op_type](), layer.inputs[0])


@converter("ReLU")
def _relu(layer: CaffeLayer) -> Value:
    slope = layer.settings("relu_param").number("negative_slope", 0.0)
    return layer.module(nn.LeakyReLU(slope) if slope else nn.ReLU(), layer.inputs[0])


@converter("PReLU")
def _prelu(layer: CaffeLayer) -> Value:
    layer.settings("prelu_param").flag("channel_shared", False)
    slope = layer.vector(0, "weight")
    module = nn.PReLU(slope.tensor.numel())
    module.weight = layer.builder.parameter(slope)
    return layer.module(module, layer.inputs[0])


@converter("ELU")
def _elu(layer: CaffeLayer) -> Value:
    return layer.module(nn.ELU(layer.settings("elu_param").number("alpha", 1.0)), layer.inputs[0])


@converter("Swish")
def _swish(layer: CaffeLayer) -> Value:
    beta = layer.settings("swish_param").number("beta", 1.0)
    if beta == 1.0:
        return layer.module(nn.SiLU(), layer.inputs[0])
    gate = layer.call(torch.sigmoid, layer.call(torch.mul, layer.inputs[0], beta))
    return layer.call(torch.mul, layer.inputs[0], gate)


@converter("Softmax")
def _softmax(layer: CaffeLayer) -> Value:
    axis = layer.axis(layer.settings("softmax_param"))
    return layer.module(nn.Softmax(axis), layer.inputs[0])


@converter("Dropout")
def _dropout(layer: CaffeLayer) -> Value:
    settings = layer.settings("dropout_param")
    settings.flag("scale_train", True)
    return layer.module(nn.Dropout(settings.number("dropout_ratio", 0.5)), layer.inputs[0])
