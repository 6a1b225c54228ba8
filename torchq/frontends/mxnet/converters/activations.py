"""Activations, and what drops values in training."""

from __future__ import annotations

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import elementwise
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

_MODULES = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softrelu": nn.Softplus,
    "softsign": nn.Softsign,
}


def _simple(op_type: str, kind: str) -> None:
    @converter(op_type)
    def convert(node: SymbolContext) -> Value:
        return node.module(_MODULES[kind](), node.inputs[0])


for _kind in ("relu", "sigmoid", "tanh", "softsign"):
    _simple(_kind, _kind)


@converter("Activation")
def _activation(node: SymbolContext) -> Value:
    kind = node.text("act_type")
    if kind not in _MODULES:
        node.refuse(f"act_type is {kind!r}; expected one of {', '.join(_MODULES)}")
    return node.module(_MODULES[kind](), node.inputs[0])


@converter("LeakyReLU")
def _leaky_relu(node: SymbolContext) -> Value:
    kind = node.text("act_type", "leaky")
    slope = node.number("slope", 0.25)
    bounds = node.number("lower_bound", 0.125), node.number("upper_bound", 0.334)
    if kind == "leaky":
        return node.module(nn.LeakyReLU(slope), node.inputs[0])
    if kind == "rrelu":
        return node.module(nn.RReLU(*bounds), node.inputs[0])
    if kind == "elu":
        return node.module(nn.ELU(slope), node.inputs[0])
    if kind in ("selu", "gelu"):
        return node.module(nn.SELU() if kind == "selu" else nn.GELU(), node.inputs[0])
    if kind != "prelu":
        node.refuse(f"act_type is {kind!r}; expected leaky, elu, selu, gelu, prelu or rrelu")
    gamma = node.parameter(1, "slope")
    module = nn.PReLU(gamma.tensor.numel())
    module.weight = node.builder.parameter(gamma, "flat", gamma.tensor.reshape(-1))
    return node.module(module, node.inputs[0])


@converter("hard_sigmoid")
def _hard_sigmoid(node: SymbolContext) -> Value:
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)
    return node.call(elementwise.hard_sigmoid, node.inputs[0], alpha, beta)


@converter("softmax", "log_softmax", "softmin")
def _softmax(node: SymbolContext) -> Value:
    axis, temperature = node.integer("axis", -1), node.number("temperature", 1.0)
    node.expect("use_length", "False", "0")
    node.expect("dtype", "float32")
    x = node.inputs[0]
    divisor = -temperature if node.op_type == "softmin" else temperature
    if divisor != 1.0:
        x = node.call(torch.div, x, divisor)
    return node.module(nn.LogSoftmax(axis) if node.op_type[0] == "l" else nn.Softmax(axis), x)


@converter("SoftmaxActivation")
def _softmax_activation(node: SymbolContext) -> Value:
    mode = node.text("mode", "instance")
    if mode not in ("instance", "channel"):
        node.refuse(f"mode is {mode!r}; expected instance or channel")
    return node.module(nn.Softmax(1 if mode == "channel" else -1), node.inputs[0])


@converter("Dropout")
def _dropout(node: SymbolContext) -> Value:
    node.expect("mode", "training")
    node.expect("axes", "()", "[]")
    return node.module(nn.Dropout(node.number("p", 0.5)), node.inputs[0])
