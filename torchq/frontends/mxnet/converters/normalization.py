"""Normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import elementwise
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

_BATCH: dict[int, type[Any]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
_INSTANCE: dict[int, type[Any]] = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


@converter("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm")
def _batch_norm(node: SymbolContext) -> Value:
    eps, momentum = node.number("eps", 1e-3), node.number("momentum", 0.9)
    axis, fixed = node.integer("axis", 1), node.flag("fix_gamma", True)
    for name in ("use_global_stats", "key", "ndev", "min_calib_range", "max_calib_range"):
        node.attr(name)  # inference always uses the global statistics
    if node.outputs > 1:
        node.refuse("its mean and variance are read, which is not supported")
    parts = [node.parameter(i + 1, what) for i, what in enumerate(_STATES)]
    if len({part.tensor.shape for part in parts}) != 1 or parts[0].tensor.dim() != 1:
        shapes = [tuple(part.tensor.shape) for part in parts]
        node.refuse(f"its parameters have the shapes {shapes}; expected equal ones")
    gamma, beta, mean, variance = parts
    ones = torch.ones_like(gamma.tensor)
    ndim = node.ndim(0)
    if ndim is None or ndim not in _BATCH or axis not in (1, 1 - ndim):
        scale = node.call(torch.ones_like, gamma) if fixed else gamma
        return node.call(
            elementwise.batch_norm, node.inputs[0], scale, beta, mean, variance, eps, axis
        )
    module = _BATCH[ndim](len(ones), eps, 1 - momentum)
    weight = node.builder.parameter(gamma, "fixed", ones) if fixed else None
    module.weight = node.builder.parameter(gamma) if weight is None else weight
    module.weight.requires_grad_(not fixed)
    module.bias = node.builder.parameter(beta)
    module.running_mean, module.running_var = mean.tensor.clone(), variance.tensor.clone()
    return node.module(module, node.inputs[0], name=node.layer_name())


_STATES = ("gamma", "beta", "moving mean", "moving variance")


@converter("InstanceNorm")
def _instance_norm(node: SymbolContext) -> Value:
    eps, ndim = node.number("eps", 1e-3), node.ndim(0)
    gamma, beta = node.parameter(1, "gamma"), node.parameter(2, "beta")
    if ndim is None or ndim not in _INSTANCE:
        return node.call(elementwise.instance_norm, node.inputs[0], gamma, beta, eps)
    module = _INSTANCE[ndim](gamma.tensor.numel(), eps, affine=True)
    module.weight, module.bias = node.builder.parameter(gamma), node.builder.parameter(beta)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("LayerNorm")
def _layer_norm(node: SymbolContext) -> Value:
    eps, axis = node.number("eps", 1e-5), node.integer("axis", -1)
    node.expect("output_mean_var", "False", "0")
    gamma, beta = node.parameter(1, "gamma"), node.parameter(2, "beta")
    if axis not in (-1, (node.ndim(0) or 0) - 1):
        return node.call(elementwise.layer_norm, node.inputs[0], gamma, beta, eps, axis)
    module = nn.LayerNorm(gamma.tensor.numel(), eps)
    module.weight, module.bias = node.builder.parameter(gamma), node.builder.parameter(beta)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("GroupNorm")
def _group_norm(node: SymbolContext) -> Value:
    groups, eps = node.integer("num_groups", 1), node.number("eps", 1e-5)
    node.expect("output_mean_var", "False", "0")
    gamma, beta = node.parameter(1, "gamma"), node.parameter(2, "beta")
    return node.call(elementwise.group_norm, node.inputs[0], gamma, beta, groups, eps)


@converter("LRN")
def _local_response(node: SymbolContext) -> Value:
    module = nn.LocalResponseNorm(
        node.integer("nsize"),
        node.number("alpha", 1e-4),
        node.number("beta", 0.75),
        node.number("knorm", 2.0),
    )
    return node.module(module, node.inputs[0])


@converter("L2Normalization")
def _l2_normalization(node: SymbolContext) -> Value:
    mode, eps = node.text("mode", "instance"), node.number("eps", 1e-10)
    if mode not in ("instance", "channel", "spatial"):
        node.refuse(f"mode is {mode!r}; expected instance, channel or spatial")
    return node.call(elementwise.l2_normalize, node.inputs[0], mode, eps)
