"""Convolutions, matrix products, pooling and norms, with the options that modules of torch lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import convolve, group_norm, pad_amounts, pool, same_pads
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    INSTANCE_NORMS,
    convolution,
    filled,
    pooling,
    symmetric,
)
from torchq.frontends.onnx.context import NodeContext, converter
from torchq.frontends.onnx.converters.quantization import module_name, weighted


@dataclass(frozen=True)
class _Window:
    """A window; its pads are numbers (all before, then all behind) or SAME_UPPER or SAME_LOWER."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    pads: list[int] | str


def _window(node: NodeContext) -> _Window:
    kernel = node.attr("kernel_shape", [])
    if not kernel and len(node.inputs) > 1:
        kernel = [int(size or 0) for size in (node.shape(1) or [])[2:]]
    spatial = len(kernel)
    if spatial not in CONVOLUTIONS:
        node.refuse(f"got a kernel of {spatial} dimensions; expected 1 to 3")
    stride, dilation = node.attr("strides", [1] * spatial), node.attr("dilations", [1] * spatial)
    pads, auto = node.attr("pads", [0] * (2 * spatial)), node.attr("auto_pad", "NOTSET")
    if [len(stride), len(dilation), len(pads)] != [spatial, spatial, 2 * spatial]:
        node.refuse(f"strides, dilations or pads do not fit a kernel of {spatial} dimensions")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return _Window(kernel, stride, dilation, auto)
    return _Window(kernel, stride, dilation, [0] * len(pads) if auto == "VALID" else pads)


def _padded(node: NodeContext, window: _Window) -> tuple[Value, list[int]]:
    """Return the input, padded where both sides differ, and the padding that is left to a layer."""
    x, none, padding = node.inputs[0], [0] * len(window.kernel), symmetric(window.pads)
    if padding is not None:
        return x, padding
    if isinstance(window.pads, str):
        options = (window.kernel, window.stride, window.dilation, window.pads == "SAME_UPPER")
        return node.call(pad_same, x, *options), none
    return node.call(F.pad, x, pad_amounts(window.pads), "constant", 0.0), none


def pad_same(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], upper: bool
) -> Tensor:
    """Return ``x`` padded with zeros so that a window gives ``ceil(size / stride)`` results."""
    return F.pad(x, pad_amounts(same_pads(x, kernel, stride, dilation, upper)))


def _stored(node: NodeContext) -> tuple[Constant, Constant | None] | None:
    """Return weight and bias where both are known, else None."""
    weight, bias = node.inputs[1], node.input(2)
    if isinstance(weight, Constant) and (bias is None or isinstance(bias, Constant)):
        return weight, bias
    return None


@converter("Conv")
def _conv(node: NodeContext) -> Value:
    window, groups, stored = _window(node), node.attr("group", 1), _stored(node)
    x, padding = _padded(node, window)
    sizes = (window.stride, padding, window.dilation)
    if stored is None:
        return node.call(convolve, x, node.inputs[1], node.input(2), *sizes, groups)
    module = convolution(node.builder, *stored, sizes, groups)
    return weighted(node, module, stored[0], x)


@converter("ConvTranspose")
def _conv_transpose(node: NodeContext) -> Value:
    window, groups, stored = _window(node), node.attr("group", 1), _stored(node)
    extra = node.attr("output_padding", [0] * len(window.kernel))
    window = _transposed_window(node, window, extra)
    stride, dilation = window.stride, window.dilation
    fits = all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True))
    padding = symmetric(window.pads)
    if padding is None or not fits or stored is None:
        options = (stride, dilation, groups, window.pads, extra)
        return node.call(conv_transpose, *node.inputs[:2], node.input(2), *options)
    sizes = (stride, padding, dilation)
    module = convolution(node.builder, *stored, sizes, groups, extra)
    return weighted(node, module, stored[0], node.inputs[0])


def _transposed_window(node: NodeContext, window: _Window, extra: list[int]) -> _Window:
    """Return the window with the pads that follow from the output shape, or from ``auto_pad``."""
    wanted, shape = node.attr("output_shape", list | None), node.shape(0)
    if not isinstance(window.pads, str) and not wanted:
        return window
    if wanted is not None and (shape is None or None in shape[2:]):
        node.refuse("its output shape is given, and its input shape is not known")
    before, behind = [], []
    parts = zip(window.kernel, window.stride, window.dilation, extra, strict=True)
    for axis, (k, s, d, e) in enumerate(parts):
        total = d * (k - 1) + 1 + e - s
        if wanted is None:  # the output size is the input size times the stride
            total = max(0, total)
        else:
            total += s * int((shape or [])[2 + axis] or 0) - wanted[-len(extra) :][axis]
        half = total // 2
        before.append(half if window.pads == "SAME_UPPER" else total - half)
        behind.append(total - before[-1])
    return _Window(window.kernel, window.stride, window.dilation, before + behind)


@converter("ConvInteger")
def _conv_integer(node: NodeContext) -> Value:
    window, groups = _window(node), node.attr("group", 1)
    if isinstance(window.pads, str):
        node.refuse("automatic padding of integers is not supported")
    x = node.call(shifted, node.inputs[0], node.input(2), 0)
    weight = node.call(shifted, node.inputs[1], node.input(3), 0)
    x = node.call(F.pad, x, pad_amounts(window.pads))
    sizes = (window.stride, [0] * len(window.kernel), window.dilation)
    y = node.call(convolve, x, weight, None, *sizes, groups)
    return node.call(torch.Tensor.to, y, torch.int32)


def shifted(x: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """Return integers as exact float64 minus their zero point, one or along ``axis``."""
    if zero_point is None:
        return x.double()
    if zero_point.numel() > 1:
        zero_point = zero_point.view([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return x.double() - zero_point.double()


@converter("MaxPool", "AveragePool")
def _pool(node: NodeContext) -> Value:
    node.attr("kernel_shape", list)
    kind, window = "max" if node.op_type == "MaxPool" else "avg", _window(node)
    if node.dtype(0) is not None and not node.floating(0):
        node.refuse("a pooling of integers is not supported")
    sizes = (window.kernel, window.stride, window.dilation, window.pads)
    include = node.attr("count_include_pad", False)
    if node.attr("ceil_mode", False):
        return node.call(pool, node.inputs[0], kind, *sizes, "ceil", include)
    return pooling(node, kind, *sizes, "valid", include)


@converter("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: NodeContext) -> Value:
    table = GLOBAL_POOLS["avg" if node.op_type == "GlobalAveragePool" else "max"]
    spatial = node.ndim(0) - 2
    if spatial not in table:
        node.refuse(f"got {spatial} spatial dimensions; expected 1 to 3")
    return node.module(table[spatial](1), node.inputs[0])


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    pads: Sequence[int],
    extra: Sequence[int],
) -> Tensor:
    """Return a transposed convolution, cropped by ``pads``, and grown by ``extra`` behind."""
    function = _TRANSPOSED[weight.dim() - 2]
    y = function(x, weight, bias, list(stride), 0, 0, groups, list(dilation))
    spatial = len(stride)
    amounts: list[int] = []
    for axis in range(spatial):
        amounts = [-pads[axis], extra[axis] - pads[spatial + axis], *amounts]
    if bias is None or all(amount <= 0 for amount in amounts):
        return F.pad(y, amounts)
    shape = (1, -1, *[1] * spatial)
    return F.pad(y - bias.view(shape), amounts) + bias.view(shape)


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
    transposed = node.attr("transA", False), node.attr("transB", False)
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
    return node.call(torch.einsum, node.attr("equation", str).replace(" ", ""), list(node.inputs))


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
    """Return the normalised tensor, means, and inverse deviations, in float32 at least."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + epsilon)
    y = ((wide - mean) * inverse).to(x.dtype) * scale
    return (y if bias is None else y + bias), mean, inverse


@converter("GroupNormalization")
def _group_norm(node: NodeContext) -> Value:
    groups, epsilon = node.attr("num_groups", int), node.attr("epsilon", 1e-5)
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
    size = node.attr("size", int)
    if size % 2 == 0:
        node.refuse(f"its size is {size}; expected an odd number of channels")
    return node.module(nn.LocalResponseNorm(size, alpha, beta, bias), node.inputs[0])
