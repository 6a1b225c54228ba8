"""Matrix products and normalization layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import group_norm
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import BATCH_NORMS, INSTANCE_NORMS, filled
from torchq.frontends.onnx.context import NodeContext, converter
from torchq.frontends.onnx.converters.convolutions import shifted
from torchq.frontends.onnx.converters.quantization import module_name, weighted


def _linear(
    node: NodeContext,
    x: Value,
    weight: Constant,
    transposed: bool,
    bias: Constant | None,
    factors: tuple[float, float] = (1.0, 1.0),
) -> Value:
    """Return a call of a linear layer."""
    tensor = weight.tensor.t() if transposed else weight.tensor
    key = "transposed" if transposed else ""
    module = nn.Linear(tensor.shape[1], tensor.shape[0], bias is not None, device="meta")
    module.weight = node.builder.parameter(weight, *_scaled(key, tensor, factors[0]))
    if bias is not None:
        vector = bias.tensor.reshape(-1).expand(tensor.shape[0])
        module.bias = node.builder.parameter(bias, *_scaled("", vector, factors[1]))
    return weighted(node, module, weight, x, transposed)


def _scaled(key: str, tensor: Tensor, factor: float) -> tuple[str, Tensor]:
    """Return a form of a parameter and its key, with a factor in both."""
    return (key, tensor) if factor == 1.0 else (f"{key} * {factor}", tensor * factor)


@converter("MatMul")
def _matmul(node: NodeContext) -> Value:
    weight = node.inputs[1]
    if isinstance(weight, Constant) and weight.tensor.dim() == 2 and node.floating(1):
        return _linear(node, node.inputs[0], weight, True, None)
    if not node.floating(0):
        return node.call(integer_matmul, *node.inputs)
    return node.call(torch.matmul, *node.inputs)


@converter("Gemm")
def _gemm(node: NodeContext) -> Value:
    x, weight, bias = node.inputs[0], node.inputs[1], node.input(2)
    transposed = bool(node.attr("transA", 0)), bool(node.attr("transB", 0))
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    if _is_linear(node) and isinstance(weight, Constant):
        x = node.call(torch.t, x) if transposed[0] else x
        own = bias if isinstance(bias, Constant) else None
        return _linear(node, x, weight, not transposed[1], own, (alpha, beta))
    return node.call(gemm, x, weight, bias, alpha, beta, *transposed)


def _is_linear(node: NodeContext) -> bool:
    """Return True for a product that a linear layer computes: known weight and bias."""
    weight, bias = node.inputs[1], node.input(2)
    if not isinstance(weight, Constant) or not weight.tensor.is_floating_point():
        return False
    if node.attr("alpha", 1.0) != 1.0 and weight in node.builder.weights:
        return False  # the codes of the file would have another scale
    if bias is None:
        return True
    out = weight.tensor.shape[0 if node.attr("transB", 0) else 1]
    return (
        isinstance(bias, Constant)
        and bias.tensor.numel() in (1, out)
        and tuple(bias.tensor.shape[-1:]) in ((), (1,), (out,))
        and bias.tensor.numel() == (bias.tensor.shape[-1] if bias.tensor.dim() else 1)
    )


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, trans_a: bool, trans_b: bool
) -> Tensor:
    """Return ``alpha * a @ b + beta * c`` of matrices that may be transposed before."""
    y = (a.t() if trans_a else a) @ (b.t() if trans_b else b)
    y = y if alpha == 1.0 else (y * alpha).to(y.dtype)
    if c is None:
        return y
    return y + (c if beta == 1.0 else (c * beta).to(y.dtype))


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of integer matrices in their element type, modulo its range."""
    if a.is_floating_point():  # the file does not tell the type
        return torch.matmul(a, b)
    return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)


@converter("MatMulInteger")
def _matmul_integer(node: NodeContext) -> Value:
    a = node.call(shifted, node.inputs[0], node.input(2), -2)
    b = node.call(shifted, node.inputs[1], node.input(3), -1)
    return node.call(torch.Tensor.to, node.call(torch.matmul, a, b), torch.int32)


@converter("Einsum")
def _einsum(node: NodeContext) -> Value:
    return node.call(torch.einsum, node.required("equation").replace(" ", ""), list(node.inputs))


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
    if parts is None or ndim not in BATCH_NORMS or not node.floating(0):
        x, scale, bias, mean, var = node.inputs
        return node.call(F.batch_norm, x, mean, var, scale, bias, False, 0.0, epsilon)
    scale_, bias_, mean_, var_ = parts
    module = BATCH_NORMS[ndim](scale_.tensor.numel(), epsilon, 1 - momentum)
    filled(node.builder, module, scale_, bias_)
    module.running_mean, module.running_var = mean_.tensor.clone(), var_.tensor.clone()
    return node.module(module, node.inputs[0], name=module_name(node, scale_))


@converter("InstanceNormalization")
def _instance_norm(node: NodeContext) -> Value:
    epsilon, parts, ndim = node.attr("epsilon", 1e-5), _constants(node, 1, 2), node.ndim(0)
    if parts is None or ndim not in INSTANCE_NORMS:
        x, scale, bias = node.inputs
        return node.call(F.instance_norm, x, None, None, scale, bias, True, 0.0, epsilon)
    module = INSTANCE_NORMS[ndim](parts[0].tensor.numel(), epsilon, affine=True)
    filled(node.builder, module, *parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@converter("LayerNormalization")
def _layer_norm(node: NodeContext) -> Value | list[Value]:
    axis, epsilon, shape = node.attr("axis", -1), node.attr("epsilon", 1e-5), node.shape(0)
    parts = _constants(node, 1) if node.input(2) is None else _constants(node, 1, 2)
    tail = None if shape is None else shape[axis % len(shape) :]
    several = len([name for name in node.output_names if name]) > 1
    is_plain = tail is not None and None not in tail and not several
    if parts is None or not is_plain or list(parts[0].tensor.shape) != tail:
        found = node.call_parts(3, layer_norm, *node.inputs[:2], node.input(2), axis, epsilon)
        return found if several else found[0]
    module = filled(node.builder, nn.LayerNorm(tail, epsilon, bias=len(parts) > 1), *parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


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
    module = filled(node.builder, nn.GroupNorm(groups, channels, epsilon), *parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@converter("LRN")
def _lrn(node: NodeContext) -> Value:
    alpha, beta, bias = node.attr("alpha", 1e-4), node.attr("beta", 0.75), node.attr("bias", 1.0)
    size = node.required("size")
    if size % 2 == 0:
        node.refuse(f"its size is {size}; expected an odd number of channels")
    return node.module(nn.LocalResponseNorm(size, alpha, beta, bias), node.inputs[0])
