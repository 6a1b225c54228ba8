"""QuantizeLinear, DequantizeLinear and operators on integers, as the ONNX standard defines them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def aligned(part: Tensor, x: Tensor, axis: int, block_size: int = 0) -> Tensor:
    """Return a scale or zero point in a shape that broadcasts against ``x``.

    One number, one for each index of ``axis``, or blocks.
    """
    if block_size:
        return part.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    if part.numel() == 1:
        return part.reshape(())
    shape = [1] * x.dim()
    shape[axis % x.dim()] = -1
    return part.view(shape)


def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    axis: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``saturate(round(x / scale) + zero_point)``, ties to even.

    FP8 types round their own way.
    """
    scale = aligned(scale, x, axis, block_size)
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        ratio = x.float() / scale.float()
        return torch.where(ratio.isnan(), ratio, ratio.clamp(-largest, largest)).to(dtype)
    codes = torch.round(x / scale)
    if zero_point is not None:
        codes = codes + aligned(zero_point, x, axis, block_size).to(codes.dtype)
    bounds = torch.iinfo(dtype)
    return codes.clamp(bounds.min, bounds.max).to(dtype)


def dequantize_linear(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block_size: int
) -> Tensor:
    """Return ``(codes - zero_point) * scale`` in the element type of the scale."""
    scale = aligned(scale, codes, axis, block_size)
    values = codes.to(torch.int64) if not codes.dtype.is_floating_point else codes.float()
    if zero_point is not None:
        zero_point = aligned(zero_point, codes, axis, block_size)
        exact = torch.float32 if zero_point.dtype.is_floating_point else torch.int64
        values = values - zero_point.to(exact)
    return values.to(scale.dtype) * scale


class _FakeQuantizeLinear(torch.autograd.Function):
    """QuantizeLinear and DequantizeLinear with a straight-through gradient.

    1 inside the range, 0 outside.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, dtype: torch.dtype
    ) -> Tensor:
        zero_point, scale = (aligned(part, x, axis).float() for part in (zero_point, scale))
        bounds = torch.iinfo(dtype)
        codes = torch.round(x.float() / scale) + zero_point
        ctx.save_for_backward((codes >= bounds.min) & (codes <= bounds.max))
        return ((codes.clamp(bounds.min, bounds.max) - zero_point) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0], None, None, None, None


def fake_quantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, dtype: torch.dtype
) -> Tensor:
    """Return ``x`` quantized and dequantized.

    Trainable, with a straight-through gradient to ``x``.
    """
    result: Tensor = _FakeQuantizeLinear.apply(x, scale, zero_point, axis, dtype)
    return result
