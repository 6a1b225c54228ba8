"""Normalisation layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.quantization import module_name
from torchq.frontends.onnx.registry import converter

_BATCH: dict[int, type[Any]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
_INSTANCE: dict[int, type[Any]] = {
    3: nn.InstanceNorm1d,
    4: nn.InstanceNorm2d,
    5: nn.InstanceNorm3d,
}


def _constants(node: NodeContext, *indices: int) -> list[Constant] | None:
    """Return inputs that are all known, else None."""
    found = [node.input(index) for index in indices]
    constants = [value for value in found if isinstance(value, Constant)]
    return constants if len(constants) == len(found) else None


@converter("BatchNormalization")
def _batch_norm(node: NodeContext) -> Value:
    if node.attr("training_mode", 0) or len([name for name in node.output_names if name]) > 1:
        node.refuse("it is in training mode; expected inference")
    epsilon, momentum = node.attr("epsilon", 1e-5), node.attr("momentum", 0.9)
    parts, ndim = _constants(node, 1, 2, 3, 4), len(node.shape(0) or ())
    if parts is None or ndim not in _BATCH or not node.floating(0):
        x, scale, bias, mean, var = node.inputs
        return node.call(F.batch_norm, x, mean, var, scale, bias, False, 0.0, epsilon)
    scale_, bias_, mean_, var_ = parts
    module = _BATCH[ndim](scale_.tensor.numel(), epsilon, 1 - momentum)
    module.weight, module.bias = (node.builder.parameter(part) for part in (scale_, bias_))
    module.running_mean, module.running_var = mean_.tensor.clone(), var_.tensor.clone()
    return node.module(module, node.inputs[0], name=module_name(node, scale_))


@converter("InstanceNormalization")
def _instance_norm(node: NodeContext) -> Value:
    epsilon, parts, ndim = node.attr("epsilon", 1e-5), _constants(node, 1, 2), node.ndim(0)
    if parts is None or ndim not in _INSTANCE:
        x, scale, bias = node.inputs
        return node.call(F.instance_norm, x, None, None, scale, bias, True, 0.0, epsilon)
    module = _INSTANCE[ndim](parts[0].tensor.numel(), epsilon, affine=True)
    module.weight, module.bias = (node.builder.parameter(part) for part in parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@converter("LayerNormalization")
def _layer_norm(node: NodeContext) -> Value | list[Value]:
    axis, epsilon = node.attr("axis", -1), node.attr("epsilon", 1e-5)
    shape = node.shape(0)
    parts = _constants(node, 1) if node.input(2) is None else _constants(node, 1, 2)
    if len([name for name in node.output_names if name]) > 1:
        return node.call_parts(3, layer_norm, *_three(node), axis, epsilon)
    tail = None if shape is None else shape[axis % len(shape) :]
    if parts is None or tail is None or None in tail or list(parts[0].tensor.shape) != tail:
        return node.call_parts(3, layer_norm, *_three(node), axis, epsilon)[0]
    module = nn.LayerNorm(tail, epsilon, bias=len(parts) > 1)
    module.weight = node.builder.parameter(parts[0])
    if len(parts) > 1:
        module.bias = node.builder.parameter(parts[1])
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


def _three(node: NodeContext) -> tuple[Value, Value, Value]:
    return node.inputs[0], node.inputs[1], node.input(2)


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None, axis: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised tensor, the means, and the inverses of the deviations.

    Computed in float32 at least.
    """
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + epsilon)
    y = ((wide - mean) * inverse).to(x.dtype) * scale
    return (y if bias is None else y + bias), mean, inverse


@converter("GroupNormalization")
def _group_norm(node: NodeContext) -> Value:
    groups, epsilon = node.required("num_groups"), node.attr("epsilon", 1e-5)
    parts = _constants(node, 1, 2)
    shape = node.shape(0)
    channels = shape[1] if shape else None
    if parts is None or channels is None or parts[0].tensor.numel() != channels:
        return node.call(group_norm, *node.inputs, groups, epsilon)
    module = nn.GroupNorm(groups, channels, epsilon)
    module.weight, module.bias = (node.builder.parameter(part) for part in parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


def group_norm(x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float) -> Tensor:
    """Return channels normalised in groups.

    Scale and bias hold one number a channel, or (before opset 21) one a group.
    """
    channels = x.shape[1]
    scale, bias = (part.repeat_interleave(channels // part.numel()) for part in (scale, bias))
    return F.group_norm(x, groups, scale, bias, epsilon)


@converter("LRN")
def _lrn(node: NodeContext) -> Value:
    alpha, beta, bias = node.attr("alpha", 1e-4), node.attr("beta", 0.75), node.attr("bias", 1.0)
    size = node.required("size")
    if size % 2 == 0:
        node.refuse(f"its size is {size}; expected an odd number of channels")
    return node.module(nn.LocalResponseNorm(size, alpha, beta, bias), node.inputs[0])


@converter("RMSNormalization")
def _rms_norm(node: NodeContext) -> Value:
    axis, epsilon = node.attr("axis", -1), node.attr("epsilon", 1e-5)
    shape, parts = node.shape(0), _constants(node, 1)
    tail = None if shape is None else shape[axis % len(shape) :]
    if parts is None or tail is None or None in tail or list(parts[0].tensor.shape) != tail:
        return node.call(rms_norm, node.inputs[0], node.inputs[1], axis, epsilon)
    module = nn.RMSNorm(tail, epsilon)
    module.weight = node.builder.parameter(parts[0])
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


def rms_norm(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> Tensor:
    """Return ``x`` over the root of its mean square along the axes from ``axis`` on, scaled."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)).to(
        x.dtype
    ) * scale
