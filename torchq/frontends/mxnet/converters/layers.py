"""Layers, pooling, norms, activations, and the ends of networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import hard_sigmoid, pool
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    INSTANCE_NORMS,
    POOLS,
    convolution,
    filled,
)
from torchq.frontends.mxnet.converters import operators
from torchq.frontends.mxnet.node import SymbolContext, converter, operator


def _window(node: SymbolContext) -> tuple[Constant, list[list[int]]]:
    """Return the weight, and stride, padding and dilation of a convolution."""
    node.expect("layout", "NCW", "NCHW", "NCDHW")
    weight = node.parameter(1, "weight")
    kernel = node.ints("kernel")
    spatial = len(kernel)
    parts = []
    for name, default in (("stride", 1), ("pad", 0), ("dilate", 1)):
        parts.append(node.ints(name, []) or [default] * spatial)
    if spatial not in CONVOLUTIONS or any(len(part) != spatial for part in parts):
        parts = [kernel, *parts]
        node.refuse(f"got kernel, stride, pad, dilation {parts}; expected 1 to 3 sizes in each")
    if list(weight.tensor.shape[2:]) != kernel:
        node.refuse(f"its weight has shape {tuple(weight.tensor.shape)}; expected kernel {kernel}")
    return weight, parts


def _bias(node: SymbolContext, without: bool, out: int) -> Constant | None:
    if without:
        return None
    bias = node.parameter(2, "bias")
    if bias.tensor.shape != (out,):
        node.refuse(f"its bias has shape {tuple(bias.tensor.shape)}; expected ({out},)")
    return bias


@converter("Convolution", "Convolution_v1", "Deconvolution")
def _convolution(node: SymbolContext) -> Value:
    weight, (stride, pad, dilation) = _window(node)
    groups, transposed = node.integer("num_group", 1), node.op_type == "Deconvolution"
    extra = None
    if transposed:
        node.expect("target_shape", "()", "[]", "(0, 0)", "(0,0)", "[0,0]")
        extra = node.ints("adj", []) or [0] * len(stride)
        if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
            node.refuse(f"adj is {extra}; expected less than the stride {stride}")
    out, filters = weight.tensor.shape[0], node.integer("num_filter")
    out = weight.tensor.shape[1] * groups if transposed else out
    if filters != out:
        node.refuse(f"its weight has {out} filters; expected num_filter, {filters}")
    bias = _bias(node, node.flag("no_bias", transposed), out)
    module = convolution(node.builder, weight, bias, (stride, pad, dilation), groups, extra)
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
    filled(node.builder, module, weight, _bias(node, no_bias, hidden))
    return node.module(module, x, name=node.layer_name())


@converter("Embedding")
def _embedding(node: SymbolContext) -> Value:
    weight = node.parameter(1, "weight")
    sizes = (node.integer("input_dim"), node.integer("output_dim"))
    node.expect("dtype", "float32")
    if tuple(weight.tensor.shape) != sizes:
        node.refuse(f"its weight has shape {tuple(weight.tensor.shape)}; expected {sizes}")
    module = filled(node.builder, nn.Embedding(*sizes, device="meta"), weight)
    indices = node.call(operators.rows, node.inputs[0], sizes[0])
    return node.module(module, indices, name=node.layer_name())


@converter("Pooling", "Pooling_v1")
def _pooling(node: SymbolContext) -> Value:
    kind = node.text("pool_type", "max")
    node.expect("layout", "NCW", "NCHW", "NCDHW")
    kernel = node.ints("kernel", [])
    spatial = len(kernel)
    stride, pad = node.ints("stride", []) or [1] * spatial, node.ints("pad", []) or [0] * spatial
    convention = node.text("pooling_convention", "valid")
    include = node.flag("count_include_pad", True)
    if kind not in ("max", "avg", "sum") or convention not in ("valid", "full"):
        node.refuse(f"got a pooling of type {kind!r} and convention {convention!r}")
    if node.flag("global_pool", False):
        layer = GLOBAL_POOLS.get(kind, {}).get((node.ndim(0) or 0) - 2)
        if layer is not None:
            return node.module(layer(1), node.inputs[0])
        return node.call(global_pool, node.inputs[0], kind)
    if not 1 <= spatial <= 3 or {len(stride), len(pad)} != {spatial}:
        node.refuse(f"got the kernel {kernel}, stride {stride}, pad {pad}; expected 1 to 3 sizes")
    if kind not in POOLS or not _as_torch(kernel, stride, pad, convention):
        window = kernel, stride, [1] * spatial, pad + pad
        return node.call(pool, node.inputs[0], kind, *window, convention, include)
    ceil_mode = convention == "full"
    counted = {} if kind == "max" else {"count_include_pad": include}
    module = POOLS[kind][spatial](kernel, stride, pad, ceil_mode=ceil_mode, **counted)
    return node.module(module, node.inputs[0])


def _as_torch(kernel: list[int], stride: list[int], pad: list[int], convention: str) -> bool:
    """Return True if a module of torch has the same windows, for inputs of any size.

    Where sizes are rounded up, torch leaves out a last window that begins in the padding, MXNet
    does not. It cannot begin there if the stride and the padding fit into the window.
    """
    parts = list(zip(kernel, stride, pad, strict=True))
    fits = all(2 * p <= k for k, _, p in parts)
    if convention == "full":
        return fits and all(s + p <= k for k, s, p in parts)
    return fits and convention == "valid"


@converter("UpSampling")
def _upsampling(node: SymbolContext) -> Value:
    scale, kind = node.integer("scale"), node.text("sample_type", "nearest")
    channels = node.integer("num_filter", 0)
    node.attr("multi_input_mode")
    if kind == "nearest":
        if len(node.inputs) != 1:
            node.refuse(f"got {len(node.inputs)} inputs; expected one")
        return node.module(nn.Upsample(scale_factor=scale, mode="nearest"), node.inputs[0])
    if kind != "bilinear":
        node.refuse(f"sample_type is {kind!r}; expected nearest or bilinear")
    weight = node.parameter(1, "weight")
    pad = -(-(scale - 1) // 2)
    channels = weight.tensor.shape[0]
    window = ([scale] * 2, [pad] * 2, [1, 1])
    module = convolution(node.builder, weight, None, window, channels, [0, 0])
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("_contrib_AdaptiveAvgPooling2D")
def _adaptive(node: SymbolContext) -> Value:
    size = node.ints("output_size", []) or [1]
    return node.module(nn.AdaptiveAvgPool2d((size[0], size[-1])), node.inputs[0])


@converter("_contrib_BilinearResize2D")
def _bilinear_resize(node: SymbolContext) -> Value:
    node.expect("mode", "size")
    align = node.flag("align_corners", True)
    names = ("scale_height", "scale_width")
    scales = None
    if None not in map(node.attr, names):
        scales = [node.number(name) for name in names]
    size = node.integer("height", 1), node.integer("width", 1)
    return node.call(resize_bilinear, node.inputs[0], *size, scales, align)


@converter("Crop")
def _crop(node: SymbolContext) -> Value:
    like = node.input(1)
    size, offset = node.ints("h_w", [0, 0]), node.ints("offset", [0, 0])
    center = node.flag("center_crop", False)
    if isinstance(like, Constant) or (like is None and 0 in size):
        node.refuse("got no size to crop to")
    return node.call(crop, node.inputs[0], like, size, offset, center)


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
    if ndim is None or ndim not in BATCH_NORMS or axis not in (1, 1 - ndim):
        scale = node.call(torch.ones_like, gamma) if fixed else gamma
        states = (scale, beta, mean, variance)
        return node.call(operators.batch_norm, node.inputs[0], *states, eps, axis)
    module = BATCH_NORMS[ndim](len(ones), eps, 1 - momentum)
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
    if ndim is None or ndim not in INSTANCE_NORMS:
        states = (None, None, gamma, beta, True, 0.0)
        return node.call(F.instance_norm, node.inputs[0], *states, eps)
    module = INSTANCE_NORMS[ndim](gamma.tensor.numel(), eps, affine=True)
    filled(node.builder, module, gamma, beta)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("LayerNorm")
def _layer_norm(node: SymbolContext) -> Value:
    eps, axis = node.number("eps", 1e-5), node.integer("axis", -1)
    node.expect("output_mean_var", "False", "0")
    gamma, beta = node.parameter(1, "gamma"), node.parameter(2, "beta")
    if axis not in (-1, (node.ndim(0) or 0) - 1):
        node.refuse(f"axis is {axis}; expected the last one")
    module = filled(node.builder, nn.LayerNorm(gamma.tensor.numel(), eps), gamma, beta)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("LRN")
def _local_response(node: SymbolContext) -> Value:
    numbers = node.number("alpha", 1e-4), node.number("beta", 0.75), node.number("knorm", 2.0)
    return node.module(nn.LocalResponseNorm(node.integer("nsize"), *numbers), node.inputs[0])


@converter("L2Normalization")
def _l2_normalization(node: SymbolContext) -> Value:
    mode, eps = node.text("mode", "instance"), node.number("eps", 1e-10)
    if mode not in ("instance", "channel", "spatial"):
        node.refuse(f"mode is {mode!r}; expected instance, channel or spatial")
    return node.call(operators.l2_normalize, node.inputs[0], mode, eps)


_ACTIVATIONS = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softrelu": nn.Softplus,
    "softsign": nn.Softsign,
}


@converter("Activation", "relu", "sigmoid", "tanh", "softsign")
def _activation(node: SymbolContext) -> Value:
    kind = node.text("act_type") if node.op_type == "Activation" else node.op_type
    if kind not in _ACTIVATIONS:
        node.refuse(f"act_type is {kind!r}; expected one of {', '.join(_ACTIVATIONS)}")
    return node.module(_ACTIVATIONS[kind](), node.inputs[0])


@converter("LeakyReLU")
def _leaky_relu(node: SymbolContext) -> Value:
    kind, slope = node.text("act_type", "leaky"), node.number("slope", 0.25)
    bounds = node.number("lower_bound", 0.125), node.number("upper_bound", 0.334)
    if kind == "prelu":
        gamma = node.parameter(1, "slope")
        module = nn.PReLU(gamma.tensor.numel())
        module.weight = node.builder.parameter(gamma, "flat", gamma.tensor.reshape(-1))
        return node.module(module, node.inputs[0])
    modules: dict[str, tuple[Any, ...]] = {
        "leaky": (nn.LeakyReLU, slope),
        "rrelu": (nn.RReLU, *bounds),
        "elu": (nn.ELU, slope),
        "selu": (nn.SELU,),
        "gelu": (nn.GELU,),
    }
    if kind not in modules:
        node.refuse(f"act_type is {kind!r}; expected prelu or one of {', '.join(modules)}")
    cls, *arguments = modules[kind]
    return node.module(cls(*arguments), node.inputs[0])


operator("hard_sigmoid", hard_sigmoid, ("number", "alpha", 0.2), ("number", "beta", 0.5))
operator("BlockGrad stop_gradient", torch.Tensor.detach)


@converter("softmax", "log_softmax")
def _softmax(node: SymbolContext) -> Value:
    axis, temperature = node.integer("axis", -1), node.number("temperature", 1.0)
    node.expect("use_length", "False", "0")
    node.expect("dtype", "float32")
    x = node.inputs[0]
    if temperature != 1.0:
        x = node.call(torch.div, x, temperature)
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


#: Operators whose inputs after the first serve training alone.
LOSSES = (
    "SoftmaxOutput",
    "Softmax",
    "LinearRegressionOutput",
    "MAERegressionOutput",
    "LogisticRegressionOutput",
)


@converter("SoftmaxOutput", "Softmax")
def _softmax_output(node: SymbolContext) -> Value:
    for name in ("ignore_label", "use_ignore"):
        node.attr(name)  # they change the gradient, not the result
    channels, last = node.flag("multi_output", False), node.flag("preserve_shape", False)
    if channels or last or node.ndim(0) == 2:
        return node.module(nn.Softmax(-1 if last and not channels else 1), node.inputs[0])
    return node.call(operators.softmax_rows, node.inputs[0])


@converter("LogisticRegressionOutput")
def _logistic(node: SymbolContext) -> Value:
    return node.module(nn.Sigmoid(), node.inputs[0])


@converter("MakeLoss", "make_loss", "_copy", "identity", "_copyto")
@converter("LinearRegressionOutput", "MAERegressionOutput")
def _passed_on(node: SymbolContext) -> Value:
    return node.inputs[0]


def global_pool(x: Tensor, kind: str) -> Tensor:
    """Return the maximum, mean or sum of each channel; its dimensions are kept as 1."""
    functions: dict[str, Any] = {"max": torch.amax, "avg": torch.mean, "sum": torch.sum}
    found: Tensor = functions[kind](x, list(range(2, x.dim())), keepdim=True)
    return found


def resize_bilinear(
    x: Tensor, height: int, width: int, scales: Sequence[float] | None, align_corners: bool
) -> Tensor:
    """Return images of ``height`` and ``width``, or scaled by ``scales``, rounded down."""
    if scales is not None:
        height, width = int(scales[0] * x.shape[2]), int(scales[1] * x.shape[3])
    return F.interpolate(x, (height, width), mode="bilinear", align_corners=align_corners)


def crop(
    x: Tensor, like: Tensor | None, size: Sequence[int], offset: Sequence[int], center: bool
) -> Tensor:
    """Return a window of images, of ``size`` or of the size of ``like``."""
    height, width = like.shape[2:] if like is not None else size
    top, left = offset
    if center:
        top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]
