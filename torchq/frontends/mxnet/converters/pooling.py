"""Pooling, upsampling and cropping."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.building.pooling import pool
from torchq.frontends.mxnet.functions import pooling
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

_MODULES: dict[str, dict[int, type[Any]]] = {
    "max": {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d},
    "avg": {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d},
}
_GLOBAL: dict[str, dict[int, type[Any]]] = {
    "max": {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d},
    "avg": {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d},
}


@converter("Pooling", "Pooling_v1")
def _pooling(node: SymbolContext) -> Value:
    kind, p = node.text("pool_type", "max"), node.integer("p_value", 2)
    node.expect("layout", "NCW", "NCHW", "NCDHW")
    kernel = node.ints("kernel", [])
    spatial = len(kernel)
    stride, pad = node.ints("stride", []) or [1] * spatial, node.ints("pad", []) or [0] * spatial
    convention = node.text("pooling_convention", "valid")
    include = node.flag("count_include_pad", True)
    if kind not in ("max", "avg", "sum", "lp") or convention not in ("valid", "full"):
        node.refuse(f"got a pooling of type {kind!r} and convention {convention!r}")
    if node.flag("global_pool", False):
        table = _GLOBAL.get(kind, {})
        ndim = node.ndim(0)
        if ndim is not None and ndim - 2 in table:
            return node.module(table[ndim - 2](1), node.inputs[0])
        return node.call(pooling.global_pool, node.inputs[0], kind, p)
    if not 1 <= spatial <= 3 or {len(stride), len(pad)} != {spatial}:
        node.refuse(f"got the kernel {kernel}, stride {stride}, pad {pad}; expected 1 to 3 sizes")
    if kind not in _MODULES or not _as_torch(kernel, stride, pad, convention):
        return node.call(pool, node.inputs[0], kind, kernel, stride, pad, convention, include, p)
    ceil_mode = convention == "full"
    counted = {} if kind == "max" else {"count_include_pad": include}
    module = _MODULES[kind][spatial](kernel, stride, pad, ceil_mode=ceil_mode, **counted)
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
    kernel, pad = 2 * scale - scale % 2, -(-(scale - 1) // 2)
    channels = weight.tensor.shape[0]
    module = nn.ConvTranspose2d(
        channels, channels, kernel, scale, pad, groups=channels, bias=False, device="meta"
    )
    module.weight = node.builder.parameter(weight)
    return node.module(module, node.inputs[0], name=node.layer_name())


@converter("_contrib_AdaptiveAvgPooling2D")
def _adaptive(node: SymbolContext) -> Value:
    size = node.ints("output_size", []) or [1]
    return node.module(nn.AdaptiveAvgPool2d((size[0], size[-1])), node.inputs[0])


@converter("_contrib_BilinearResize2D")
def _bilinear_resize(node: SymbolContext) -> Value:
    node.expect("mode", "size")
    align = node.flag("align_corners", True)
    height, width = node.attr("scale_height"), node.attr("scale_width")
    scales = None
    if height is not None and width is not None:
        scales = [node.number("scale_height"), node.number("scale_width")]
    size = node.integer("height", 1), node.integer("width", 1)
    return node.call(pooling.resize_bilinear, node.inputs[0], *size, scales, align)


@converter("Crop")
def _crop(node: SymbolContext) -> Value:
    like = node.input(1)
    size, offset = node.ints("h_w", [0, 0]), node.ints("offset", [0, 0])
    center = node.flag("center_crop", False)
    if isinstance(like, Constant) or (like is None and 0 in size):
        node.refuse("got no size to crop to")
    return node.call(pooling.crop, node.inputs[0], like, size, offset, center)
