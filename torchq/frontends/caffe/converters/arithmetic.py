"""Arithmetic on values, element by element or along axes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.caffe.functions import arithmetic
from torchq.frontends.caffe.node import CaffeLayer
from torchq.frontends.caffe.registry import converter

_ELTWISE: dict[str, Callable[..., Tensor]] = {
    "PROD": torch.mul,
    "SUM": torch.add,
    "MAX": torch.maximum,
}


@converter("AbsVal")
def _absolute(layer: CaffeLayer) -> Value:
    return layer.call(torch.abs, layer.inputs[0])


@converter("Power")
def _power(layer: CaffeLayer) -> Value:
    settings = layer.settings("power_param")
    numbers = (settings.number("power", 1.0), settings.number("scale", 1.0))
    return layer.call(arithmetic.power, layer.inputs[0], *numbers, settings.number("shift", 0.0))


@converter("Exp", "Log")
def _exp_and_log(layer: CaffeLayer) -> Value:
    settings = layer.settings(f"{layer.op_type.lower()}_param")
    function = arithmetic.exponential if layer.op_type == "Exp" else arithmetic.logarithm
    numbers = (settings.number("base", -1.0), settings.number("scale", 1.0))
    return layer.call(function, layer.inputs[0], *numbers, settings.number("shift", 0.0))


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
        return layer.call(arithmetic.weighted_sum, list(layer.inputs), factors)
    return functools.reduce(lambda a, b: layer.call(_ELTWISE[kind], a, b), layer.inputs)


@converter("Scale")
def _scale(layer: CaffeLayer) -> Value:
    settings = layer.settings("scale_param")
    axis, with_bias = settings.integer("axis", 1), settings.flag("bias_term", False)
    settings.integer("num_axes", 1)
    given = len(layer.inputs) > 1
    scale = layer.inputs[1] if given else layer.blob(0, "weight")
    bias = layer.blob(0 if given else 1, "bias") if with_bias else None
    return layer.call(arithmetic.affine, layer.inputs[0], scale, bias, axis)


@converter("Bias")
def _bias(layer: CaffeLayer) -> Value:
    settings = layer.settings("bias_param")
    axis = settings.integer("axis", 1)
    settings.integer("num_axes", 1)
    bias = layer.inputs[1] if len(layer.inputs) > 1 else layer.blob(0, "bias")
    return layer.call(arithmetic.affine, layer.inputs[0], None, bias, axis)


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
        return layer.call(arithmetic.within_channel, layer.inputs[0], size, alpha, beta)
    return layer.module(nn.LocalResponseNorm(size, alpha, beta, k), layer.inputs[0])


@converter("MVN")
def _mean_variance(layer: CaffeLayer) -> Value:
    settings = layer.settings("mvn_param")
    options = (settings.flag("normalize_variance", True), settings.flag("across_channels", False))
    eps = settings.number("eps", 1e-9)
    return layer.call(arithmetic.mean_variance, layer.inputs[0], *options, eps)


@converter("Normalize")
def _normalize(layer: CaffeLayer) -> Value:
    settings = layer.settings("norm_param")
    across, eps = settings.flag("across_spatial", True), settings.number("eps", 1e-10)
    settings.flag("channel_shared", True)
    scale = layer.vector(0, "weight")
    return layer.call(arithmetic.normalize, layer.inputs[0], scale, across, eps)


@converter("Reduction")
def _reduction(layer: CaffeLayer) -> Value:
    settings = layer.settings("reduction_param")
    kind = settings.choice("operation", "SUM", "ASUM", "SUMSQ", "MEAN", first=1)
    axis, factor = settings.integer("axis", 0), settings.number("coeff", 1.0)
    layer.result_ndim = axis if axis >= 0 else None
    return layer.call(arithmetic.reduce, layer.inputs[0], kind, axis, factor)


@converter("ArgMax")
def _arg_max(layer: CaffeLayer) -> Value:
    settings = layer.settings("argmax_param")
    count, values = settings.integer("top_k", 1), settings.flag("out_max_val", False)
    axis = settings.integer("axis") if settings.has("axis") else None
    layer.result_ndim = 3 if axis is None else layer.ndims[0]
    return layer.call(arithmetic.arg_max, layer.inputs[0], count, axis, values)


@converter("Parameter")
def _parameter(layer: CaffeLayer) -> Value:
    found = layer.blob(0, "weight")
    layer.result_ndim = found.tensor.dim()
    return Constant(found.tensor, found.name, trainable=True)
