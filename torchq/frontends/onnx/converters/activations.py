"""Activations, as modules of torch.nn where torch has one with the same meaning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.arithmetic import scalar_or_value
from torchq.frontends.onnx.functions import elementwise
from torchq.frontends.onnx.registry import converter

_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "Relu": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "HardSwish": nn.Hardswish,
    "Mish": nn.Mish,
}


@converter(*_PLAIN)
def _plain(node: NodeContext) -> Value:
    return node.module(_PLAIN[node.op_type](), node.inputs[0])


@converter("LeakyRelu")
def _leaky_relu(node: NodeContext) -> Value:
    return node.module(nn.LeakyReLU(node.attr("alpha", 0.01)), node.inputs[0])


@converter("Elu")
def _elu(node: NodeContext) -> Value:
    return node.module(nn.ELU(node.attr("alpha", 1.0)), node.inputs[0])


@converter("Selu")
def _selu(node: NodeContext) -> Value:
    for name, number in (("alpha", 1.6732632), ("gamma", 1.0507010)):
        if abs(node.attr(name, number) - number) > 1e-6:
            node.refuse(f"its {name} is {node.attr(name)}; expected {number}")
    return node.module(nn.SELU(), node.inputs[0])


@converter("Gelu")
def _gelu(node: NodeContext) -> Value:
    return node.module(nn.GELU(node.attr("approximate", "none")), node.inputs[0])


@converter("Swish")
def _swish(node: NodeContext) -> Value:
    alpha = node.attr("alpha", 1.0)
    if alpha == 1.0:
        return node.module(nn.SiLU(), node.inputs[0])
    gate = node.call(torch.sigmoid, node.call(torch.mul, node.inputs[0], alpha))
    return node.call(torch.mul, node.inputs[0], gate)


@converter("HardSigmoid")
def _hard_sigmoid(node: NodeContext) -> Value:
    alpha, beta = node.attr("alpha", 0.2), node.attr("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return node.module(nn.Hardsigmoid(), node.inputs[0])
    return node.call(elementwise.hard_sigmoid, node.inputs[0], alpha, beta)


@converter("PRelu")
def _prelu(node: NodeContext) -> Value:
    slope, shape = node.constant(1), node.shape(0)
    if slope is not None and shape is not None and len(shape) >= 2:
        channels = shape[1]
        leading = slope.dim() == len(shape) - 1
        per_channel = leading and slope.dim() > 0 and slope.numel() == slope.shape[0] == channels
        if slope.numel() == 1 or per_channel:
            module = nn.PReLU(slope.numel())
            module.weight = nn.Parameter(slope.reshape(-1).clone())
            return node.module(module, node.inputs[0])
    return node.call(elementwise.prelu, *node.inputs)


@converter("Softmax", "LogSoftmax")
def _softmax(node: NodeContext) -> Value:
    axis = node.attr("axis", -1 if node.version >= 13 else 1)
    modules = {"Softmax": nn.Softmax, "LogSoftmax": nn.LogSoftmax}
    last = node.shape(0) is not None and axis in (-1, node.ndim(0) - 1)
    if node.version >= 13 or last:
        return node.module(modules[node.op_type](axis), node.inputs[0])
    # Before opset 13 the axes from ``axis`` on count as one.
    flat = node.call(torch.flatten, node.inputs[0], axis)
    result = node.module(modules[node.op_type](-1), flat)
    return node.call(torch.Tensor.view_as, result, node.inputs[0])


@converter("Clip")
def _clip(node: NodeContext) -> Value:
    low = scalar_or_value(node, 1) if node.input(1) is not None else None
    high = scalar_or_value(node, 2) if node.input(2) is not None else None
    numbers = (int, float)
    if isinstance(low, (*numbers, type(None))) and isinstance(high, (*numbers, type(None))):
        return _clamp(node, -torch.inf if low is None else low, torch.inf if high is None else high)
    return node.call(elementwise.clip, node.inputs[0], node.input(1), node.input(2))


def _clamp(node: NodeContext, low: float, high: float) -> Value:
    if (low, high) == (0, 6) and node.floating(0):
        return node.module(nn.ReLU6(), node.inputs[0])
    if (low, high) == (0, torch.inf) and node.floating(0):
        return node.module(nn.ReLU(), node.inputs[0])
    bounds = [None if abs(bound) == torch.inf else bound for bound in (low, high)]
    if bounds == [None, None]:
        return node.inputs[0]
    return node.call(torch.clamp, node.inputs[0], *bounds)


@converter("Dropout")
def _dropout(node: NodeContext) -> list[Value]:
    training = node.input(2)
    ratio = float(node.attr("ratio", 0.5))  # an attribute up to opset 11
    if node.input(1) is not None:
        ratio = float(node.known(1, "ratio"))
    if training is not None and bool(node.known(2, "training mode")) and ratio > 0:
        node.refuse("it drops values at random; expected inference")
    result = node.module(nn.Dropout(ratio), node.inputs[0])
    if len(node.output_names) < 2:
        return [result]
    return [result, node.call(torch.ones_like, node.inputs[0], dtype=torch.bool)]
