"""Convolutions, transposed convolutions and pooling, with the options that torch's modules lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.onnx.context import NodeContext, converter
from torchq.frontends.onnx.converters.quantization import weighted

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
        x = node.call(pad_same, x, kernel, stride, dilation, upper, value)
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
        return node.call(conv, x, weight, bias, stride, padding, dilation, groups)
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
        return node.call(conv_transpose, node.inputs[0], weight, bias, *options)
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
    y = node.call(conv, x, weight, None, stride, zeros, dilation, groups)
    return node.call(torch.Tensor.to, y, torch.int32)


def shifted(x: torch.Tensor, zero_point: torch.Tensor | None, axis: int) -> torch.Tensor:
    """Return integers minus their zero point, as float64, which is exact."""
    if zero_point is None:
        return x.double()
    if zero_point.numel() > 1:
        zero_point = zero_point.view([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return x.double() - zero_point.double()


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
        return node.call(max_pool_of_padded, x, kernel, stride, dilation)
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
        average_pool, node.inputs[0], kernel, stride, dilation, pads, ceil_mode, include
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
    return average_pool(x, kernel, stride, dilation, before + behind, False, include)


@converter("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: NodeContext) -> Value:
    table = _GLOBAL_AVERAGE if node.op_type == "GlobalAveragePool" else _GLOBAL_MAX
    spatial = node.ndim(0) - 2
    if spatial not in table:
        node.refuse(f"got {spatial} spatial dimensions; expected 1 to 3")
    return node.module(table[spatial](1), node.inputs[0])


_CONV_FUNCTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSE_FUNCTION = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_FUNCTION = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def pad_same(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    upper: bool,
    value: float,
) -> Tensor:
    """Pad so that a window of ``stride`` gives ``ceil(size / stride)`` results.

    ``upper`` puts the odd element behind.
    """
    pads: list[int] = []
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        size = x.shape[axis]
        missing = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
        before = missing // 2 if upper else missing - missing // 2
        pads = [before, missing - before, *pads]
    return F.pad(x, pads, value=value)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a convolution with a weight that the network computes."""
    function = _CONV_FUNCTION[weight.dim() - 2]
    return function(x, weight, bias, list(stride), list(padding), list(dilation), groups)


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
    function = _TRANSPOSE_FUNCTION[weight.dim() - 2]
    y = function(x, weight, bias, list(stride), 0, 0, groups, list(dilation))
    spatial = len(stride)
    amounts: list[int] = []
    for axis in range(spatial):
        amounts = [-pads[axis], extra[axis] - pads[spatial + axis], *amounts]
    if bias is None or all(amount <= 0 for amount in amounts):
        return F.pad(y, amounts)
    shape = (1, -1, *[1] * spatial)
    return F.pad(y - bias.view(shape), amounts) + bias.view(shape)


def max_pool_of_padded(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return the maxima of windows of a tensor that is padded with -inf.

    It is no module and no function of torch, so that no quantizer is placed on its input.
    """
    return _MAX_FUNCTION[len(kernel)](x, list(kernel), list(stride), 0, list(dilation))


def _windows(
    size: int, kernel: int, stride: int, dilation: int, before: int, behind: int, ceil: bool
) -> int:
    """Return how many windows fit.

    With ``ceil`` the last may reach out, but begins inside the input or the padding before it.
    """
    room = size + before + behind - dilation * (kernel - 1) - 1
    count = -(-room // stride) + 1 if ceil else room // stride + 1
    if ceil and (count - 1) * stride >= size + before:
        count -= 1
    return count


def average_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    ceil_mode: bool,
    include_pad: bool,
) -> Tensor:
    """Return the means of windows.

    A window that reaches beyond the padding counts only what is inside the padding.
    """
    spatial = len(kernel)
    sums = _window_sums(x, kernel, stride, dilation, pads, ceil_mode)
    inside = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if include_pad:
        amounts = [
            side for axis in reversed(range(spatial)) for side in (pads[axis], pads[spatial + axis])
        ]
        inside = F.pad(inside, amounts, value=1.0)
        counts = _window_sums(
            inside, kernel, stride, dilation, [0] * (2 * spatial), ceil_mode, like=sums
        )
    else:
        counts = _window_sums(inside, kernel, stride, dilation, pads, ceil_mode)
    return sums / counts


def _window_sums(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    ceil_mode: bool,
    like: Tensor | None = None,
) -> Tensor:
    """Return the sums of windows, a convolution of each channel with ones."""
    spatial, amounts = len(kernel), list[int]()
    for axis in range(spatial):
        before, behind, size = pads[axis], pads[spatial + axis], x.shape[2 + axis]
        k, s, d = kernel[axis], stride[axis], dilation[axis]
        count = (
            _windows(size, k, s, d, before, behind, ceil_mode)
            if like is None
            else like.shape[2 + axis]
        )
        reach = (count - 1) * s + d * (k - 1) + 1
        amounts = [before, reach - before - size, *amounts]
    planes = F.pad(x, amounts).reshape(
        -1, 1, *[n + a for n, a in zip(x.shape[2:], _per_axis(amounts), strict=True)]
    )
    ones = torch.ones((1, 1, *kernel), dtype=x.dtype, device=x.device)
    sums = _CONV_FUNCTION[spatial](planes, ones, None, list(stride), 0, list(dilation))
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def _per_axis(amounts: Sequence[int]) -> list[int]:
    """Return what ``F.pad`` adds to each axis, first axis first."""
    return [amounts[i] + amounts[i + 1] for i in range(0, len(amounts), 2)][::-1]
