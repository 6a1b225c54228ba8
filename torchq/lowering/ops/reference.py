"""The integer operators in plain torch.

Exact on any device: sums of products of integers stay below 2**53 and are computed in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.ops.epilogues import activation
from torchq.lowering.ops.params import ConvParams, Epilogue, Int8Weights

__all__ = ["conv", "finish", "linear"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the convolution of ``x`` (uint8 codes); see ``torchq::int8_conv``."""
    spatial_dims = weights.codes.dim() - 2
    codes = x.double() - weights.x_zero_point
    sums = _CONV[spatial_dims](codes, weights.codes.double(), None, *params)
    real = _scale(sums, weights, (1, -1, *[1] * spatial_dims))
    return finish(real, epilogue, residual)


def linear(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    """Return ``x @ weight.T + bias`` for uint8 codes; see ``torchq::int8_linear``."""
    sums = F.linear(x.double() - weights.x_zero_point, weights.codes.double())
    return finish(_scale(sums, weights, (-1,)), epilogue)


def finish(real: Tensor, epilogue: Epilogue, residual: Tensor | None = None) -> Tensor:
    """Return the epilogue of real-valued float32 sums.

    Args:
        real: float32.
        epilogue: what to do.
        residual: floating point, or codes of the epilogue's residual; broadcast to ``real``.
    """
    if residual is not None:
        real = real + epilogue.residual_values(residual)
    y = activation(real, epilogue.activation, epilogue.arguments)
    if epilogue.dtype is not torch.uint8:
        return y.to(epilogue.dtype)
    codes = torch.round(y / epilogue.scale).add_(epilogue.zero_point)
    return codes.clamp_(0, 255).to(torch.uint8)


def _scale(sums: Tensor, weights: Int8Weights, shape: tuple[int, ...]) -> Tensor:
    y = sums.float() * (weights.scale * weights.x_scale).view(shape)
    return y if weights.bias is None else y + weights.bias.view(shape)
