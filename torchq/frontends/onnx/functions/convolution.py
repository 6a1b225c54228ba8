"""Padding, convolution and pooling with ONNX's options that torch's modules do not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


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
    function = _CONV[weight.dim() - 2]
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
    function = _TRANSPOSE[weight.dim() - 2]
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
    return _MAX_POOL[len(kernel)](x, list(kernel), list(stride), 0, list(dilation))


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

    Args:
        x: (N, C, ...).
        kernel: size of a window.
        stride: between windows.
        dilation: between the elements of a window.
        pads: all before, then all behind.
        ceil_mode: let the last window reach out.
        include_pad: count the zeros of the padding, but not those that ``ceil_mode`` adds.
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
    sums = _CONV[spatial](planes, ones, None, list(stride), 0, list(dilation))
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def _per_axis(amounts: Sequence[int]) -> list[int]:
    """Return what ``F.pad`` adds to each axis, first axis first."""
    return [amounts[i] + amounts[i + 1] for i in range(0, len(amounts), 2)][::-1]
