"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.quantization import weighted
from torchq.frontends.onnx.functions import convolution
from torchq.frontends.onnx.registry import converter

_CONV: dict[int, type[Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSE: dict[int, type[Any]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}


def window(node: NodeContext, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return stride, dilation, and pads (all before, then all behind) of a window."""
    spatial = len(kernel)
    stride = list(node.attr("strides", [1] * spatial))
    dilation = list(node.attr("dilations", [1] * spatial))
    pads = list(node.attr("pads", [0] * (2 * spatial)))
    if [len(stride), len(dilation), len(pads)] != [spatial, spatial, 2 * spatial]:
        node.refuse(f"strides, dilations or pads do not fit a kernel of {spatial} dimensions")
    return stride, dilation, pads


def pad_amounts(pads: list[int]) -> list[int]:
    """Return ONNX's pads (all before, then all behind) in the order of ``F.pad``."""
    spatial = len(pads) // 2
    return [
        side for axis in reversed(range(spatial)) for side in (pads[axis], pads[spatial + axis])
    ]


def padded_input(
    node: NodeContext, kernel: list[int], value: float = 0.0
) -> tuple[Value, list[int], list[int], list[int]]:
    """Return the input, the stride, the dilation, and the padding that is left to the layer.

    The input is padded already where the padding is not the same on both sides.
    """
    stride, dilation, pads = window(node, kernel)
    auto, spatial, x = node.attr("auto_pad", "NOTSET"), len(kernel), node.inputs[0]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        upper = auto == "SAME_UPPER"
        x = node.call(convolution.pad_same, x, kernel, stride, dilation, upper, value)
        return x, stride, dilation, [0] * spatial
    if auto == "VALID":
        pads = [0] * (2 * spatial)
    if pads[:spatial] == pads[spatial:] and min(pads, default=0) >= 0:
        return x, stride, dilation, pads[:spatial]
    x = node.call(F.pad, x, pad_amounts(pads), "constant", value)
    return x, stride, dilation, [0] * spatial


@converter("Conv")
def _conv(node: NodeContext) -> Value:
    weight, bias = node.inputs[1], node.input(2)
    known = isinstance(weight, Constant) and (bias is None or isinstance(bias, Constant))
    kernel = list(node.attr("kernel_shape", ()) or (node.shape(1) or [])[2:])
    if len(kernel) not in _CONV:
        node.refuse(f"got a kernel of {len(kernel)} dimensions; expected 1 to 3")
    x, stride, dilation, padding = padded_input(node, kernel)
    groups = node.attr("group", 1)
    if not known:
        return node.call(convolution.conv, x, weight, bias, stride, padding, dilation, groups)
    assert isinstance(weight, Constant)
    out, per_group = weight.tensor.shape[:2]
    module = _CONV[len(kernel)](
        per_group * groups,
        out,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        bias is not None,
        device="meta",
    )
    module.weight = node.builder.parameter(weight)
    if isinstance(bias, Constant):
        module.bias = node.builder.parameter(bias)
    return weighted(node, module, weight, x)


@converter("ConvTranspose")
def _conv_transpose(node: NodeContext) -> Value:
    weight, bias = node.inputs[1], node.input(2)
    kernel = list(node.attr("kernel_shape", ()) or (node.shape(1) or [])[2:])
    if len(kernel) not in _TRANSPOSE:
        node.refuse(f"got a kernel of {len(kernel)} dimensions; expected 1 to 3")
    stride, dilation, pads = window(node, kernel)
    spatial, groups = len(kernel), node.attr("group", 1)
    extra = list(node.attr("output_padding", [0] * spatial))
    pads = _transposed_pads(node, kernel, stride, dilation, pads, extra)
    symmetric = pads[:spatial] == pads[spatial:] and min(pads) >= 0
    fits = all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True))
    known = isinstance(weight, Constant) and (bias is None or isinstance(bias, Constant))
    if not (symmetric and fits and known):
        options = (stride, dilation, groups, pads, extra)
        return node.call(convolution.conv_transpose, node.inputs[0], weight, bias, *options)
    assert isinstance(weight, Constant)
    inputs, per_group = weight.tensor.shape[:2]
    module = _TRANSPOSE[spatial](
        inputs,
        per_group * groups,
        kernel,
        stride,
        pads[:spatial],
        extra,
        groups,
        bias is not None,
        dilation,
        device="meta",
    )
    module.weight = node.builder.parameter(weight)
    if isinstance(bias, Constant):
        module.bias = node.builder.parameter(bias)
    return weighted(node, module, weight, node.inputs[0])


def _transposed_pads(
    node: NodeContext,
    kernel: list[int],
    stride: list[int],
    dilation: list[int],
    pads: list[int],
    extra: list[int],
) -> list[int]:
    """Return the pads of a transposed convolution.

    They are derived where the file gives the output shape, or ``auto_pad``.
    """
    auto, wanted = node.attr("auto_pad", "NOTSET"), node.attr("output_shape")
    same = auto in ("SAME_UPPER", "SAME_LOWER")
    if not same and not wanted:
        return [0] * len(pads) if auto == "VALID" else pads
    shape = node.shape(0)
    if wanted is not None and (shape is None or None in shape[2:]):
        node.refuse("its output shape is given, and its input shape is not known")
    before, behind = [], []
    for axis, (k, s, d, e) in enumerate(zip(kernel, stride, dilation, extra, strict=True)):
        if wanted is None:
            # The output size is the input size times the stride.
            total = max(0, d * (k - 1) + 1 + e - s)
        else:
            size = int((shape or [])[2 + axis] or 0)
            total = s * (size - 1) + e + d * (k - 1) + 1 - wanted[-len(kernel) :][axis]
        half = total // 2
        before.append(half if auto == "SAME_UPPER" else total - half)
        behind.append(total - before[-1])
    return before + behind


@converter("ConvInteger")
def _conv_integer(node: NodeContext) -> Value:
    kernel = list(node.attr("kernel_shape", ()) or (node.shape(1) or [])[2:])
    stride, dilation, pads = window(node, kernel)
    if node.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        node.refuse("automatic padding of integers is not supported")
    x = node.call(shifted, node.inputs[0], node.input(2), 0)
    weight = node.call(shifted, node.inputs[1], node.input(3), 0)
    x = node.call(F.pad, x, pad_amounts(pads))
    zeros, groups = [0] * len(kernel), node.attr("group", 1)
    y = node.call(convolution.conv, x, weight, None, stride, zeros, dilation, groups)
    return node.call(torch.Tensor.to, y, torch.int32)


def shifted(x: torch.Tensor, zero_point: torch.Tensor | None, axis: int) -> torch.Tensor:
    """Return integers minus their zero point, as float64, which is exact.

    Args:
        x: integers.
        zero_point: one number, or one for each index of ``axis``.
        axis: of the zero points.
    """
    if zero_point is None:
        return x.double()
    if zero_point.numel() > 1:
        zero_point = zero_point.view([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return x.double() - zero_point.double()
