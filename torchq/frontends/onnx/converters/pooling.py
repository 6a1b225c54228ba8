"""Pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.frontends.building import Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.convolutions import padded_input, window
from torchq.frontends.onnx.functions import convolution
from torchq.frontends.onnx.registry import converter

_MAX: dict[int, type[Any]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_AVERAGE: dict[int, type[Any]] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
_GLOBAL_AVERAGE: dict[int, type[Any]] = {
    1: nn.AdaptiveAvgPool1d,
    2: nn.AdaptiveAvgPool2d,
    3: nn.AdaptiveAvgPool3d,
}
_GLOBAL_MAX: dict[int, type[Any]] = {
    1: nn.AdaptiveMaxPool1d,
    2: nn.AdaptiveMaxPool2d,
    3: nn.AdaptiveMaxPool3d,
}


def _kernel(node: NodeContext) -> list[int]:
    kernel = list(node.required("kernel_shape"))
    if len(kernel) not in _MAX:
        node.refuse(f"got a kernel of {len(kernel)} dimensions; expected 1 to 3")
    return kernel


@converter("MaxPool")
def _max_pool(node: NodeContext) -> Value:
    kernel, ceil_mode = _kernel(node), bool(node.attr("ceil_mode", 0))
    if not node.floating(0):
        return _max_pool_integers(node, kernel)
    x, stride, dilation, padding = padded_input(node, kernel, -torch.inf)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)) or ceil_mode:
        amounts = [side for p in reversed(padding) for side in (p, p)]
        x = node.call(pad_for_ceil, x, amounts, kernel, stride, dilation, ceil_mode)
    if x is not node.inputs[0]:
        return node.call(convolution.max_pool_of_padded, x, kernel, stride, dilation)
    return node.module(_MAX[len(kernel)](kernel, stride, padding, dilation), x)


def pad_for_ceil(
    x: Tensor,
    amounts: list[int],
    kernel: list[int],
    stride: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Tensor:
    """Pad with -inf so that a pooling that rounds down has the windows of one that rounds up.

    ONNX lets a window begin anywhere inside the input or the padding before it, and ignores one
    that begins behind.
    """
    amounts = list(amounts)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        at = 2 * (len(kernel) - 1 - axis)
        size = x.shape[2 + axis] + amounts[at] + amounts[at + 1]
        room = size - d * (k - 1) - 1
        if ceil_mode and room % s:
            count = -(-room // s)
            if count * s < x.shape[2 + axis] + amounts[at]:
                amounts[at + 1] += count * s - room
    return torch.nn.functional.pad(x, amounts, value=-torch.inf)


def _max_pool_integers(node: NodeContext, kernel: list[int]) -> Value:
    stride, dilation, pads = window(node, kernel)
    if len(kernel) != 2 or node.attr("auto_pad", "NOTSET") != "NOTSET" or node.attr("ceil_mode", 0):
        node.refuse("a pooling of integers with these settings is not supported")
    dtype = node.dtype(0)
    if dtype is None:
        node.refuse("its element type is not known")
    return node.call(max_pool_integers, node.inputs[0], kernel, stride, dilation, pads)


def max_pool_integers(
    x: Tensor, kernel: list[int], stride: list[int], dilation: list[int], pads: list[int]
) -> Tensor:
    """Return the maxima of windows of 8-bit integers."""
    wide = torch.nn.functional.pad(
        x.float(), [pads[1], pads[3], pads[0], pads[2]], value=-torch.inf
    )
    return torch.nn.functional.max_pool2d(wide, kernel, stride, 0, dilation).to(x.dtype)


@converter("AveragePool")
def _average_pool(node: NodeContext) -> Value:
    kernel, ceil_mode = _kernel(node), bool(node.attr("ceil_mode", 0))
    stride, dilation, pads = window(node, kernel)
    include = bool(node.attr("count_include_pad", 0))
    auto, spatial = node.attr("auto_pad", "NOTSET"), len(kernel)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return node.call(
            average_pool_same,
            node.inputs[0],
            kernel,
            stride,
            dilation,
            auto == "SAME_UPPER",
            include,
        )
    if auto == "VALID":
        pads = [0] * (2 * spatial)
    plain = set(dilation) <= {1} and pads[:spatial] == pads[spatial:] and not ceil_mode
    if plain and all(2 * p <= k for p, k in zip(pads, kernel, strict=False)):
        counted = include or not any(pads)
        return node.module(
            _AVERAGE[spatial](kernel, stride, pads[:spatial], count_include_pad=counted),
            node.inputs[0],
        )
    return node.call(
        convolution.average_pool, node.inputs[0], kernel, stride, dilation, pads, ceil_mode, include
    )


def average_pool_same(
    x: Tensor, kernel: list[int], stride: list[int], dilation: list[int], upper: bool, include: bool
) -> Tensor:
    """Return the means of windows with automatic padding."""
    before, behind = [], []
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        size = x.shape[axis]
        missing = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
        before.append(missing // 2 if upper else missing - missing // 2)
        behind.append(missing - before[-1])
    return convolution.average_pool(x, kernel, stride, dilation, before + behind, False, include)


@converter("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: NodeContext) -> Value:
    table = _GLOBAL_AVERAGE if node.op_type == "GlobalAveragePool" else _GLOBAL_MAX
    spatial = node.ndim(0) - 2
    if spatial not in table:
        node.refuse(f"got {spatial} spatial dimensions; expected 1 to 3")
    return node.module(table[spatial](1), node.inputs[0])
