"""Layers, pooling, norms, activations, and the ends of networks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import hard_sigmoid
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    INSTANCE_NORMS,
    batch_norm,
    convolution,
    filled,
    pooling,
)
from torchq.frontends.building.one_call import one_call
from torchq.frontends.mxnet.converters import operators
from torchq.frontends.mxnet.node import SymbolContext, converter, row


def _window(
    node: SymbolContext, *sizes: tuple[str, int]
) -> tuple[list[int], list[list[int]]]:
    """Return the kernel, and what the node says of its steps, by default the same number each."""
    node.expect("layout", "NCW", "NCHW", "NCDHW")
    kernel = node.attr("kernel", list)
    parts = [node.attr(name, []) or [default] * len(kernel) for name, default in sizes]
    if len(kernel) not in CONVOLUTIONS or {len(part) for part in parts} != {
        len(kernel)
    }:
        names = ", ".join(name for name, _ in sizes)
        node.refuse(
            f"got kernel, {names} {[kernel, *parts]}; expected 1 to 3 sizes in each"
        )
    return kernel, parts


def _bias(node: SymbolContext, out: int, without: bool = False) -> Constant | None:
    if node.attr("no_bias", without):
        return None
    bias = node.parameter(2, "bias")
    if bias.tensor.shape != (out,):
        node.refuse(f"its bias has shape {tuple(bias.tensor.shape)}; expected ({out},)")
    return bias


@converter("Convolution", "Convolution_v1", "Deconvolution")
def _convolution(node: SymbolContext) -> Value:
    kernel, window = _window(node, ("stride", 1), ("pad", 0), ("dilate", 1))
    weight = node.parameter(1, "weight")
    stride, pad, dilation = window
    shape = tuple(weight.tensor.shape)
    if list(shape[2:]) != kernel:
        node.refuse(f"its weight has shape {shape}; expected kernel {kernel}")
    groups = node.attr("num_group", 1)
    transposed = node.op_type == "Deconvolution"
    extra = None
    if transposed:
        node.expect("target_shape", "()", "[]", "(0, 0)", "(0,0)", "[0,0]")
        extra = node.attr("adj", []) or [0] * len(stride)
        if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
            node.refuse(f"adj is {extra}; expected less than the stride {stride}")
    out = shape[1] * groups if transposed else shape[0]
    filters = node.attr("num_filter", int)
    if filters != out:
        node.refuse(f"its weight has {out} filters; expected num_filter, {filters}")
    bias = _bias(node, out, transposed)
    sizes = (stride, pad, dilation)
    stored = [weight] if bias is None else [weight, bias]
    return node.layer(convolution(node.builder, stored, sizes, groups, extra))


@converter("FullyConnected")
def _fully_connected(node: SymbolContext) -> Value:
    weight = node.parameter(1, "weight")
    hidden = node.attr("num_hidden", int)
    if weight.tensor.dim() != 2 or weight.tensor.shape[0] != hidden:
        node.refuse(
            f"its weight has shape {tuple(weight.tensor.shape)}; expected ({hidden}, any)"
        )
    x = node.inputs[0]
    bias = _bias(node, hidden)
    if node.attr("flatten", True) and node.ndim(0) != 2:
        x = node.call(torch.flatten, x, 1)
    module = nn.Linear(weight.tensor.shape[1], hidden, bias is not None, device="meta")
    return node.layer(filled(node.builder, module, weight, bias), x)


@converter("Embedding")
def _embedding(node: SymbolContext) -> Value:
    weight = node.parameter(1, "weight")
    sizes = (node.attr("input_dim", int), node.attr("output_dim", int))
    node.expect("dtype", "float32")
    if tuple(weight.tensor.shape) != sizes:
        node.refuse(
            f"its weight has shape {tuple(weight.tensor.shape)}; expected {sizes}"
        )
    module = filled(node.builder, nn.Embedding(*sizes, device="meta"), weight)
    return node.layer(module, node.call(operators.rows, node.inputs[0], sizes[0]))


@converter("Pooling", "Pooling_v1")
def _pooling(node: SymbolContext) -> Value:
    kind = node.attr("pool_type", "max")
    convention = node.attr("pooling_convention", "valid")
    include = node.attr("count_include_pad", True)
    is_global = node.attr("global_pool", False)
    if kind not in ("max", "avg", "sum") or convention not in ("valid", "full"):
        node.refuse(f"got a pooling of type {kind!r} and convention {convention!r}")
    if is_global:
        for name in ("kernel", "stride", "pad", "layout"):
            node.attr(name)
        layer = GLOBAL_POOLS.get(kind, {}).get((node.ndim(0) or 0) - 2)
        if layer is not None:
            return node.module(layer(1), node.inputs[0])
        return node.call(global_pool, node.inputs[0], kind)
    kernel, (stride, pad) = _window(node, ("stride", 1), ("pad", 0))
    return pooling(
        node, kind, kernel, stride, [1] * len(kernel), pad + pad, convention, include
    )


@converter("UpSampling")
def _upsampling(node: SymbolContext) -> Value:
    scale = node.attr("scale", int)
    kind = node.attr("sample_type", "nearest")
    node.attr("multi_input_mode"), node.attr("num_filter")
    if kind == "nearest":
        if len(node.inputs) != 1:
            node.refuse(f"got {len(node.inputs)} inputs; expected one")
        return node.module(
            nn.Upsample(scale_factor=scale, mode="nearest"), node.inputs[0]
        )
    if kind != "bilinear":
        node.refuse(f"sample_type is {kind!r}; expected nearest or bilinear")
    weight = node.parameter(1, "weight")
    pad = -(-(scale - 1) // 2)
    window = ([scale] * 2, [pad] * 2, [1, 1])
    channels = weight.tensor.shape[0]
    return node.layer(convolution(node.builder, [weight], window, channels, [0, 0]))


@converter("_contrib_AdaptiveAvgPooling2D")
def _adaptive(node: SymbolContext) -> Value:
    size = node.attr("output_size", []) or [1]
    return node.module(nn.AdaptiveAvgPool2d((size[0], size[-1])), node.inputs[0])


@converter("_contrib_BilinearResize2D")
def _bilinear_resize(node: SymbolContext) -> Value:
    node.expect("mode", "size")
    sides = ("height", "width")
    scales = [node.attr(f"scale_{side}", float | None) for side in sides]
    size = [node.attr(side, 1) for side in sides]
    align = node.attr("align_corners", True)
    return node.call(resize_bilinear, node.inputs[0], size, scales, align)


@converter("Crop")
def _crop(node: SymbolContext) -> Value:
    like = node.input(1)
    size = node.attr("h_w", [0, 0])
    options = node.attr("offset", [0, 0]), node.attr("center_crop", False)
    if isinstance(like, Constant) or (like is None and 0 in size):
        node.refuse("got no size to crop to")
    return node.call(crop, node.inputs[0], like, size, *options)


@converter("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm")
def _batch_norm(node: SymbolContext) -> Value:
    eps = node.attr("eps", 1e-3)
    momentum = node.attr("momentum", 0.9)
    axis = node.attr("axis", 1)
    fixed = node.attr("fix_gamma", True)
    for name in (
        "use_global_stats",
        "key",
        "ndev",
        "min_calib_range",
        "max_calib_range",
    ):
        node.attr(name)  # inference always uses the global statistics
    if node.outputs > 1:
        node.refuse("its mean and variance are read, which is not supported")
    names = ("gamma", "beta", "moving mean", "moving variance")
    parts = [node.parameter(i, name) for i, name in enumerate(names, 1)]
    if len({part.tensor.shape for part in parts}) != 1 or parts[0].tensor.dim() != 1:
        shapes = [tuple(part.tensor.shape) for part in parts]
        node.refuse(f"its parameters have the shapes {shapes}; expected equal ones")
    gamma, beta, mean, variance = parts
    ndim = node.ndim(0)
    if ndim is None or ndim not in BATCH_NORMS or axis not in (1, 1 - ndim):
        scale = node.call(torch.ones_like, gamma) if fixed else gamma
        states = (scale, beta, mean, variance)
        return node.call(operators.batch_norm, node.inputs[0], *states, eps, axis)
    module = batch_norm(node.builder, ndim, parts, eps, 1 - momentum)
    if fixed:
        module.weight = node.builder.parameter(
            gamma, "fixed", torch.ones_like(gamma.tensor)
        )
    module.weight.requires_grad_(not fixed)
    return node.layer(module)


@converter("InstanceNorm")
def _instance_norm(node: SymbolContext) -> Value:
    eps = node.attr("eps", 1e-3)
    ndim = node.ndim(0)
    gamma = node.parameter(1, "gamma")
    beta = node.parameter(2, "beta")
    if ndim is None or ndim not in INSTANCE_NORMS:
        states = (None, None, gamma, beta, True, 0.0)
        return node.call(F.instance_norm, node.inputs[0], *states, eps)
    module = INSTANCE_NORMS[ndim](gamma.tensor.numel(), eps, affine=True)
    return node.layer(filled(node.builder, module, gamma, beta))


@converter("LayerNorm")
def _layer_norm(node: SymbolContext) -> Value:
    eps = node.attr("eps", 1e-5)
    axis = node.attr("axis", -1)
    node.expect("output_mean_var", "False", "0")
    gamma = node.parameter(1, "gamma")
    beta = node.parameter(2, "beta")
    if axis not in (-1, (node.ndim(0) or 0) - 1):
        node.refuse(f"axis is {axis}; expected the last one")
    return node.layer(
        filled(node.builder, nn.LayerNorm(gamma.tensor.numel(), eps), gamma, beta)
    )


@converter("L2Normalization")
def _l2_normalization(node: SymbolContext) -> Value:
    mode = node.attr("mode", "instance")
    if mode not in ("instance", "channel", "spatial"):
        node.refuse(f"mode is {mode!r}; expected instance, channel or spatial")
    return node.call(
        operators.l2_normalize, node.inputs[0], mode, node.attr("eps", 1e-10)
    )


_ACTIVATIONS = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softsign": nn.Softsign,
}
for _name, _module in _ACTIVATIONS.items():
    row(_name, _module)
row("LogisticRegressionOutput", nn.Sigmoid)
row("Flatten flatten", nn.Flatten)
row("LRN", nn.LocalResponseNorm, nsize=int, alpha=1e-4, beta=0.75, knorm=2.0)
row("hard_sigmoid", hard_sigmoid, alpha=0.2, beta=0.5)
row("BlockGrad stop_gradient", torch.Tensor.detach)


@converter("Activation")
def _activation(node: SymbolContext) -> Value:
    kind = node.attr("act_type", str)
    activations = _ACTIVATIONS | {"softrelu": nn.Softplus}
    if kind not in activations:
        node.refuse(f"act_type is {kind!r}; expected one of {', '.join(activations)}")
    return node.module(activations[kind](), node.inputs[0])


@converter("LeakyReLU")
def _leaky_relu(node: SymbolContext) -> Value:
    kind = node.attr("act_type", "leaky")
    slope = node.attr("slope", 0.25)
    bounds = node.attr("lower_bound", 0.125), node.attr("upper_bound", 0.334)
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
        node.refuse(
            f"act_type is {kind!r}; expected prelu or one of {', '.join(modules)}"
        )
    cls, *arguments = modules[kind]
    return node.module(cls(*arguments), node.inputs[0])


@converter("softmax", "log_softmax")
def _softmax(node: SymbolContext) -> Value:
    axis = node.attr("axis", -1)
    temperature = node.attr("temperature", 1.0)
    x = node.inputs[0]
    node.expect("use_length", "False", "0")
    node.expect("dtype", "float32")
    if temperature != 1.0:
        x = node.call(torch.div, x, temperature)
    return node.module(
        nn.LogSoftmax(axis) if node.op_type[0] == "l" else nn.Softmax(axis), x
    )


@converter("SoftmaxActivation")
def _softmax_activation(node: SymbolContext) -> Value:
    mode = node.attr("mode", "instance")
    if mode not in ("instance", "channel"):
        node.refuse(f"mode is {mode!r}; expected instance or channel")
    return node.module(nn.Softmax(1 if mode == "channel" else -1), node.inputs[0])


@converter("Dropout")
def _dropout(node: SymbolContext) -> Value:
    node.expect("mode", "training")
    node.expect("axes", "()", "[]")
    return node.module(nn.Dropout(node.attr("p", 0.5)), node.inputs[0])


#: Operators whose inputs after the first serve training alone.
LOSSES = ("SoftmaxOutput", "Softmax") + tuple(
    f"{kind}RegressionOutput" for kind in ("Linear", "MAE", "Logistic")
)


@converter("SoftmaxOutput", "Softmax")
def _softmax_output(node: SymbolContext) -> Value:
    for name in ("ignore_label", "use_ignore"):
        node.attr(name)  # they change the gradient, not the result
    channels = node.attr("multi_output", False)
    last = node.attr("preserve_shape", False)
    if channels or last or node.ndim(0) == 2:
        return node.module(
            nn.Softmax(-1 if last and not channels else 1), node.inputs[0]
        )
    return node.call(operators.softmax_rows, node.inputs[0])


@converter("MakeLoss", "make_loss", "_copy", "identity", "_copyto")
@converter("LinearRegressionOutput", "MAERegressionOutput")
def _passed_on(node: SymbolContext) -> Value:
    return node.inputs[0]


@one_call
def global_pool(x: Tensor, kind: str) -> Tensor:
    """Return the maximum, mean or sum of each channel; its dimensions are kept as 1."""
    names = {"max": "amax", "avg": "mean"}
    pooled: Tensor = getattr(torch, names.get(kind, kind))(
        x, list(range(2, x.dim())), keepdim=True
    )
    return pooled


@one_call
def resize_bilinear(
    x: Tensor, size: Sequence[int], scales: Sequence[float | None], align_corners: bool
) -> Tensor:
    """Return images of a height and width, or scaled, rounded down."""
    pairs = zip(size, scales, x.shape[2:], strict=True)
    size = [new if scale is None else int(scale * old) for new, scale, old in pairs]
    return F.interpolate(x, size, mode="bilinear", align_corners=align_corners)


@one_call
def crop(
    x: Tensor,
    like: Tensor | None,
    size: Sequence[int],
    offset: Sequence[int],
    center: bool,
) -> Tensor:
    """Return a window of images, of ``size`` or of the size of ``like``."""
    height, width = like.shape[2:] if like is not None else size
    top, left = offset
    if center:
        top = (x.shape[2] - height) // 2
        left = (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]
