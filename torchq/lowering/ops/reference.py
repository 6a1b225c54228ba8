"""The integer operators in plain torch, exact on any device: products and sums of integers below 2**53 in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.ops.epilogues import activation

__all__ = ["conv", "linear", "finish"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def finish(
    sums: Tensor,
    out_scale: float,
    out_zero_point: int,
    out_dtype: torch.dtype,
    name: str,
    arguments: Sequence[float],
    residual: Tensor | None,
) -> Tensor:
    """Add the (real) residual, apply the activation, and round to codes where ``out_dtype`` is uint8."""
    y = sums if residual is None else sums + residual
    y = activation(y, name, arguments)
    if out_dtype is not torch.uint8:
        return y.to(out_dtype)
    return torch.round(y / out_scale).add_(out_zero_point).clamp_(0, 255).to(torch.uint8)


def conv(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Real-valued float32 result of a convolution on codes."""
    function = _CONV[weight.dim() - 2]
    sums = function(
        x.double() - x_zero_point,
        weight.double(),
        None,
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
    )
    return _scale(sums, weight_scale, bias, x_scale, (1, -1, *[1] * (weight.dim() - 2)))


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
) -> Tensor:
    """Real-valued float32 result of ``x @ weight.T`` on codes."""
    return _scale(
        F.linear(x.double() - x_zero_point, weight.double()), weight_scale, bias, x_scale, (-1,)
    )


def _scale(
    sums: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, shape: tuple[int, ...]
) -> Tensor:
    y = sums.float() * (weight_scale * x_scale).view(shape)
    return y if bias is None else y + bias.view(shape)
