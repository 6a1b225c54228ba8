"""Convolutions, transposed convolutions and pooling, with the options that torch's modules lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.frontends.building.functions import convolve, pad_amounts, pool, same_pads
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import CONVOLUTIONS, GLOBAL_POOLS, POOLS, convolution
from torchq.frontends.onnx.context import NodeContext, converter
from torchq.frontends.onnx.converters.quantization import weighted


@dataclass(frozen=True)
class _Window:
    """A window; its pads are numbers (all before, then all behind) or SAME_UPPER or SAME_LOWER."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    pads: list[int] | str

    @property
    def padding(self) -> list[int] | None:
        """Return the pads of each side where both sides have the same, else None."""
        if isinstance(self.pads, str):
            return None
        before, behind = self.pads[: len(self.kernel)], self.pads[len(self.kernel) :]
        return before if before == behind and min(before, default=0) >= 0 else None


def _window(node: NodeContext) -> _Window:
    kernel = list(node.attr("kernel_shape", ()))
    if not kernel and len(node.inputs) > 1:
        kernel = [int(size or 0) for size in (node.shape(1) or [])[2:]]
    spatial = len(kernel)
    if spatial not in CONVOLUTIONS:
        node.refuse(f"got a kernel of {spatial} dimensions; expected 1 to 3")
    stride = list(node.attr("strides", [1] * spatial))
    dilation = list(node.attr("dilations", [1] * spatial))
    pads = list(node.attr("pads", [0] * (2 * spatial)))
    if [len(stride), len(dilation), len(pads)] != [spatial, spatial, 2 * spatial]:
        node.refuse(f"strides, dilations or pads do not fit a kernel of {spatial} dimensions")
    auto = node.attr("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return _Window(kernel, stride, dilation, auto)
    return _Window(kernel, stride, dilation, [0] * len(pads) if auto == "VALID" else pads)


def _padded(node: NodeContext, window: _Window) -> tuple[Value, list[int]]:
    """Return the input, and the padding that is left to the layer.

    The input is padded already where the padding is not the same on both sides.
    """
    x, none = node.inputs[0], [0] * len(window.kernel)
    if window.padding is not None:
        return x, window.padding
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
    extra = list(node.attr("output_padding", [0] * len(window.kernel)))
    window = _transposed_window(node, window, extra)
    stride, dilation = window.stride, window.dilation
    fits = all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True))
    if window.padding is None or not fits or stored is None:
        options = (stride, dilation, groups, window.pads, extra)
        return node.call(conv_transpose, *node.inputs[:2], node.input(2), *options)
    sizes = (stride, window.padding, dilation)
    module = convolution(node.builder, *stored, sizes, groups, extra)
    return weighted(node, module, stored[0], node.inputs[0])


def _transposed_window(node: NodeContext, window: _Window, extra: list[int]) -> _Window:
    """Return the window with the pads that follow from the output shape, or from ``auto_pad``."""
    wanted, shape = node.attr("output_shape"), node.shape(0)
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
    """Return integers minus their zero point, as float64, which is exact.

    The zero point is one number, or one for each index of ``axis``.
    """
    if zero_point is None:
        return x.double()
    if zero_point.numel() > 1:
        zero_point = zero_point.view([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return x.double() - zero_point.double()


@converter("MaxPool", "AveragePool")
def _pool(node: NodeContext) -> Value:
    node.required("kernel_shape")
    kind, window = "max" if node.op_type == "MaxPool" else "avg", _window(node)
    if node.dtype(0) is not None and not node.floating(0):
        node.refuse("a pooling of integers is not supported")
    include, ceil_mode = bool(node.attr("count_include_pad", 0)), bool(node.attr("ceil_mode", 0))
    kernel, padding = window.kernel, window.padding
    fits = padding is not None and all(2 * p <= k for p, k in zip(padding, kernel, strict=True))
    if ceil_mode or not fits or (kind == "avg" and set(window.dilation) != {1}):
        sizes = (kernel, window.stride, window.dilation, window.pads)
        convention = "ceil" if ceil_mode else "valid"
        return node.call(pool, node.inputs[0], kind, *sizes, convention, include)
    options: dict[str, Any] = {"dilation": window.dilation}
    if kind == "avg":
        options = {"count_include_pad": include or not any(padding or ())}
    module = POOLS[kind][len(kernel)](kernel, window.stride, padding, **options)
    return node.module(module, node.inputs[0])


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
    """Return a transposed convolution.

    The result is cropped by ``pads`` (all before, then all behind), and grown by ``extra`` behind.
    """
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
