"""Activations, softmax and dropout."""

from __future__ import annotations

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.caffe.functions import arithmetic
from torchq.frontends.caffe.node import CaffeLayer
from torchq.frontends.caffe.registry import converter

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


@converter("Clip")
def _clip(layer: CaffeLayer) -> Value:
    settings = layer.settings("clip_param")
    return layer.call(torch.clamp, layer.inputs[0], settings.number("min"), settings.number("max"))


@converter("Threshold")
def _threshold(layer: CaffeLayer) -> Value:
    limit = layer.settings("threshold_param").number("threshold", 0.0)
    return layer.call(arithmetic.above, layer.inputs[0], limit)


@converter("Softmax")
def _softmax(layer: CaffeLayer) -> Value:
    axis = layer.axis(layer.settings("softmax_param"))
    return layer.module(nn.Softmax(axis), layer.inputs[0])


@converter("Dropout")
def _dropout(layer: CaffeLayer) -> Value:
    settings = layer.settings("dropout_param")
    settings.flag("scale_train", True)
    return layer.module(nn.Dropout(settings.number("dropout_ratio", 0.5)), layer.inputs[0])
