"""Layers with a weight: convolutions, fully connected and recurrent layers, embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.mxnet.functions import movement
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

_CONV: dict[int, type[Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSE: dict[int, type[Any]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}


def _window(node: SymbolContext, table: dict[int, type[Any]]) -> tuple[Constant, list[list[int]]]:
    """Return the weight, and kernel, stride, pad and dilation of a convolution."""
    node.expect("layout", "NCW", "NCHW", "NCDHW")
    weight = node.parameter(1, "weight")
    kernel = node.ints("kernel")
    spatial = len(kernel)
    parts = [kernel]
    for name, default in (("stride", 1), ("pad", 0), ("dilate", 1)):
        parts.append(node.ints(name, []) or [default] * spatial)
    if spatial not in table or any(len(part) != spatial for part in parts):
        node.refuse(f"got kernel, stride, pad and dilation {parts}; expected 1 to 3 sizes in each")
    if list(weight.tensor.shape[2:]) != kernel:
        node.refuse(f"its weight has shape {tuple(weight.tensor.shape)}; expected kernel {kernel}")
    return weight, parts


def _add_bias(node: SymbolContext, module: Any, no_bias: bool, out: int) -> None:
    if no_bias:
        return
    bias = node.parameter(2, "bias")
    if bias.tensor.shape != (out,):
        node.refuse(f"its bias has shape {tuple(bias.tensor.shape)}; expected ({out},)")
    module.bias = node.builder.parameter(bias)


@converter("Convolution", "Convolution_v1")
def _convolution(node: SymbolContext) -> Value:
    weight, (kernel, stride, pad, dilate) = _window(node, _CONV)
    groups, no_bias = node.integer("num_group", 1), node.flag("no_bias", False)
    out, per_group = weight.tensor.shape[:2]
    if node.integer("num_filter") != out:
        node.refuse(
            f"its weight has {out} filters; expected num_filter, {node.integer('num_filter')}"
        )
    module = _CONV[len(kernel)](
        per_group * groups, out, kernel, stride, pad, dilate, groups, not no_bias, device="meta"
    )
    module.weight = node.builder.parameter(weight)
    _add_bias(node, module, no_bias, out)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("Deconvolution")
def _deconvolution(node: SymbolContext) -> Value:
    weight, (kernel, stride, pad, dilate) = _window(node, _TRANSPOSE)
    groups, no_bias = node.integer("num_group", 1), node.flag("no_bias", True)
    node.expect("target_shape", "()", "[]", "(0, 0)", "(0,0)", "[0,0]")
    extra = node.ints("adj", []) or [0] * len(kernel)
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilate, strict=True)):
        node.refuse(f"adj is {extra}; expected less than the stride {stride}")
    inputs, per_group = weight.tensor.shape[:2]
    out = per_group * groups
    if node.integer("num_filter") != out:
        node.refuse(
            f"its weight has {out} filters; expected num_filter, {node.integer('num_filter')}"
        )
    module = _TRANSPOSE[len(kernel)](
        inputs, out, kernel, stride, pad, extra, groups, not no_bias, dilate, device="meta"
    )
    module.weight = node.builder.parameter(weight)
    _add_bias(node, module, no_bias, out)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("FullyConnected")
def _fully_connected(node: SymbolContext) -> Value:
    weight, no_bias = node.parameter(1, "weight"), node.flag("no_bias", False)
    hidden = node.integer("num_hidden")
    if weight.tensor.dim() != 2 or weight.tensor.shape[0] != hidden:
        node.refuse(f"its weight has shape {tuple(weight.tensor.shape)}; expected ({hidden}, any)")
    x = node.inputs[0]
    if node.flag("flatten", True) and node.ndim(0) != 2:
        x = node.call(torch.flatten, x, 1)
    module = nn.Linear(weight.tensor.shape[1], hidden, not no_bias, device="meta")
    module.weight = node.builder.parameter(weight)
    _add_bias(node, module, no_bias, hidden)
    return node.module(module, x, name=node.layer_name())


@converter("Embedding", "_contrib_SparseEmbedding")
def _embedding(node: SymbolContext) -> Value:
    weight = node.parameter(1, "weight")
    sizes = (node.integer("input_dim"), node.integer("output_dim"))
    node.expect("dtype", "float32")
    if tuple(weight.tensor.shape) != sizes:
        node.refuse(f"its weight has shape {tuple(weight.tensor.shape)}; expected {sizes}")
    module = nn.Embedding(*sizes, device="meta")
    module.weight = node.builder.parameter(weight)
    indices = node.call(movement.rows, node.inputs[0], sizes[0])
    return node.module(module, indices, name=node.layer_name())
