"""Operators that end a network for training: each has the label as an input that is dropped."""

from __future__ import annotations

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import elementwise
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

#: Operators whose inputs after the first serve training alone.
LOSSES = (
    "SoftmaxOutput",
    "Softmax",
    "LinearRegressionOutput",
    "MAERegressionOutput",
    "LogisticRegressionOutput",
    "SVMOutput",
)


@converter("SoftmaxOutput", "Softmax")
def _softmax_output(node: SymbolContext) -> Value:
    for name in ("ignore_label", "use_ignore"):
        node.attr(name)  # they change the gradient, not the result
    if node.flag("multi_output", False):
        return node.module(nn.Softmax(1), node.inputs[0])
    if node.flag("preserve_shape", False):
        return node.module(nn.Softmax(-1), node.inputs[0])
    if node.ndim(0) == 2:
        return node.module(nn.Softmax(1), node.inputs[0])
    return node.call(elementwise.softmax_rows, node.inputs[0])


@converter("LinearRegressionOutput", "MAERegressionOutput", "SVMOutput")
def _unchanged(node: SymbolContext) -> Value:
    for name in ("margin", "regularization_coefficient", "use_linear"):
        node.attr(name)
    return node.inputs[0]


@converter("LogisticRegressionOutput")
def _logistic(node: SymbolContext) -> Value:
    return node.module(nn.Sigmoid(), node.inputs[0])


@converter("MakeLoss", "make_loss", "_copy", "identity", "_copyto", "_CrossDeviceCopy")
def _passed_on(node: SymbolContext) -> Value:
    return node.inputs[0]


@converter("BlockGrad", "stop_gradient")
def _block_gradient(node: SymbolContext) -> Value:
    return node.call(torch.Tensor.detach, node.inputs[0])
