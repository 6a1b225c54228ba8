"""Convolutions, inner products, pooling and activations."""

import torch
import torch.nn.functional as F
from torch import nn

from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    convolution,
    filled,
    pooling,
)
from torchq.frontends.caffe.node import CaffeLayer, converter, row


def sizes(
    layer: CaffeLayer,
    spatial: int,
    repeated: str,
    pair: str = "",
    default: int | None = None,
) -> list[int]:
    """Return one size for each dimension of a window."""
    named = [f"{pair or repeated}_h", f"{pair or repeated}_w"]
    if any(layer.settings.has(name) for name in named):
        if spatial != 2:
            layer.refuse(
                f"got {named[0]} for {spatial} dimensions; expected {repeated}"
            )
        return [layer.attr(name, int if default is None else default) for name in named]
    sizes = layer.attr(repeated, [] if default is None else [default])
    sizes = sizes * spatial if len(sizes) == 1 else sizes
    if len(sizes) != spatial:
        layer.refuse(f"{repeated} is {sizes}; expected {spatial} sizes")
    return sizes


_DEPTHWISE = ("DepthwiseConvolution", "ConvolutionDepthwise", "ConvolutionDW")


@converter("Convolution", "Deconvolution", *_DEPTHWISE, about="convolution_param")
def _convolution(layer: CaffeLayer) -> Value:
    transposed = layer.op_type == "Deconvolution"
    weight = layer.blob(0, "weight")
    spatial = weight.tensor.dim() - 2
    if spatial not in CONVOLUTIONS or layer.attr("axis", 1) != 1:
        layer.refuse(
            f"its weight has {spatial} spatial dimensions; expected 1 to 3, and axis 1"
        )
    kernel = sizes(layer, spatial, "kernel_size", "kernel")
    steps = (("stride", 1), ("pad", 0), ("dilation", 1))
    stride, pad, dilation = (
        sizes(layer, spatial, name, default=n) for name, n in steps
    )
    out = layer.attr("num_output", int)
    with_bias = layer.attr("bias_term", True)
    groups = layer.attr("group", 1)
    groups = out if layer.op_type in _DEPTHWISE else groups
    first, second = weight.tensor.shape[:2]
    expected = [first, out // max(groups, 1)] if transposed else [out, second]
    if list(weight.tensor.shape) != [*expected, *kernel]:
        shape = tuple(weight.tensor.shape)
        layer.refuse(
            f"its weight has the shape {shape}; expected {[*expected, *kernel]}"
        )
    stored = [weight, layer.vector(1, "bias", out)] if with_bias else [weight]
    extra = [0] * spatial if transposed else None
    module = convolution(layer.builder, stored, (stride, pad, dilation), groups, extra)
    return layer.module(module, layer.inputs[0])


@converter("InnerProduct", about="inner_product_param")
def _inner_product(layer: CaffeLayer) -> Value:
    out = layer.attr("num_output", int)
    with_bias = layer.attr("bias_term", True)
    axis = layer.axis()
    weight = layer.blob(0, "weight")
    x = layer.inputs[0]
    if weight.tensor.numel() % max(out, 1):
        layer.refuse(
            f"its weight has the shape {tuple(weight.tensor.shape)} for {out} outputs"
        )
    transposed = layer.attr("transpose", False)
    form = weight.tensor.reshape((-1, out) if transposed else (out, -1))
    form = form.t() if transposed else form
    if layer.ndims[0] != axis + 1:
        x = layer.call(torch.flatten, x, axis)
    module = nn.Linear(form.shape[1], out, with_bias, device="meta")
    module.weight = layer.builder.parameter(weight, "matrix", form)
    if with_bias:
        module.bias = layer.builder.parameter(layer.vector(1, "bias", out))
    layer.result_ndim = axis + 1
    return layer.module(module, x)


@converter("BatchNorm", about="batch_norm_param")
def _batch_norm(layer: CaffeLayer) -> Value:
    eps = layer.attr("eps", 1e-5)
    if not layer.attr("use_global_stats", True):
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
    plain = scale.attr("axis", 1) == 1 and scale.attr("num_axes", 1) == 1
    with_bias = scale.attr("bias_term", False)
    scale.check_all_read()
    fits = scale.blobs[0].numel() == channels and len(scale.blobs) == 1 + with_bias
    return scale if plain and fits else None


@converter("Pooling", about="pooling_param")
def _pooling(layer: CaffeLayer) -> Value:
    kind = layer.settings.choice("pool", "MAX", "AVE", "STOCHASTIC")
    if kind == "STOCHASTIC" or len(layer.layer.tops) > 1:
        layer.refuse("stochastic pooling, and the places of maxima, are not supported")
    kind = {"MAX": "max", "AVE": "avg"}[kind]
    if layer.attr("global_pooling", False):
        for field in ("kernel_size", "stride", "pad"):
            layer.attr(field, [])
        return layer.module(GLOBAL_POOLS[kind][2](1), layer.inputs[0])
    kernel = sizes(layer, 2, "kernel_size", "kernel")
    stride = sizes(layer, 2, "stride", default=1)
    pad = sizes(layer, 2, "pad", default=0)
    up = layer.settings.choice("round_mode", "CEIL", "FLOOR") == "CEIL"
    up = layer.attr("ceil_mode", up)
    if any(p >= k for k, p in zip(kernel, pad, strict=True)):
        layer.refuse(f"pad is {pad}; expected less than the kernel {kernel}")
    # Without padding Caffe keeps a last window that begins behind the input, torch does not.
    convention = ("ceil" if any(pad) else "full") if up else "valid"
    return pooling(layer, kind, kernel, stride, [1, 1], pad + pad, convention, True)


@converter("ReLU", about="relu_param")
def _relu(layer: CaffeLayer) -> Value:
    slope = layer.attr("negative_slope", 0.0)
    return layer.module(nn.LeakyReLU(slope) if slope else nn.ReLU(), layer.inputs[0])


@converter("PReLU", about="prelu_param")
def _prelu(layer: CaffeLayer) -> Value:
    layer.attr("channel_shared", False)
    slope = layer.vector(0, "weight")
    module = nn.PReLU(slope.tensor.numel())
    module.weight = layer.builder.parameter(slope)
    return layer.module(module, layer.inputs[0])


@converter("Swish", about="swish_param")
def _swish(layer: CaffeLayer) -> Value:
    beta = layer.attr("beta", 1.0)
    x = layer.inputs[0]
    if beta == 1.0:
        return layer.module(nn.SiLU(), x)
    return layer.call(
        torch.mul, x, layer.call(torch.sigmoid, layer.call(torch.mul, x, beta))
    )


@converter("Softmax", about="softmax_param")
def _softmax(layer: CaffeLayer) -> Value:
    return layer.module(nn.Softmax(layer.axis()), layer.inputs[0])


@converter("Dropout", about="dropout_param")
def _dropout(layer: CaffeLayer) -> Value:
    layer.attr("scale_train", True)
    return layer.module(nn.Dropout(layer.attr("dropout_ratio", 0.5)), layer.inputs[0])


row("Sigmoid", nn.Sigmoid)
row("TanH", nn.Tanh)
row("ReLU6", nn.ReLU6)
row("BNLL", nn.Softplus)
row("ELU", nn.ELU, about="elu_param", alpha=1.0)
