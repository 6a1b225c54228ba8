"""Pooling. Sizes are rounded up."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.frontends.building import Value
from torchq.frontends.building.pooling import pool
from torchq.frontends.caffe.converters.layers import sizes
from torchq.frontends.caffe.node import CaffeLayer
from torchq.frontends.caffe.registry import converter


@converter("Pooling")
def _pooling(layer: CaffeLayer) -> Value:
    settings = layer.settings("pooling_param")
    kind = settings.choice("pool", "MAX", "AVE", "STOCHASTIC")
    if kind == "STOCHASTIC" or len(layer.layer.tops) > 1:
        layer.refuse("stochastic pooling, and the places of maxima, are not supported")
    if settings.flag("global_pooling", False):
        for name in ("kernel_size", "stride", "pad"):
            settings.integers(name)
        return layer.module(
            nn.AdaptiveMaxPool2d(1) if kind == "MAX" else nn.AdaptiveAvgPool2d(1), layer.inputs[0]
        )
    kernel = sizes(layer, settings, 2, "kernel_size", "kernel", -1)
    stride = sizes(layer, settings, 2, "stride", "stride", 1)
    pad = sizes(layer, settings, 2, "pad", "pad", 0)
    up = settings.choice("round_mode", "CEIL", "FLOOR") == "CEIL"
    up = settings.flag("ceil_mode", up)
    parts = list(zip(kernel, stride, pad, strict=True))
    if any(p >= k for k, _, p in parts):
        layer.refuse(f"pad is {pad}; expected less than the kernel {kernel}")
    # Without padding Caffe keeps a last window that begins behind the input, torch does not.
    outside = up and not any(pad) and any(s > k for k, s, _ in parts)
    if outside or any(2 * p > k for k, _, p in parts):
        if up and any(pad):
            layer.refuse(f"a pad of {pad} with a kernel of {kernel} is not supported")
        name = {"MAX": "max", "AVE": "avg"}[kind]
        convention = "full" if up else "valid"
        return layer.call(pool, layer.inputs[0], name, kernel, stride, pad, convention, True, 2)
    table: dict[str, type[Any]] = {"MAX": nn.MaxPool2d, "AVE": nn.AvgPool2d}
    return layer.module(table[kind](kernel, stride, pad, ceil_mode=up), layer.inputs[0])
