"""Clipping with gradients to its bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.errors import ConfigError
from torchq.functional import compute_dtype

__all__ = ["ClipFunction", "clip"]


class ClipFunction(torch.autograd.Function):
    """``min(max(input, low), high)``, broadcasting; gradient to the input strictly inside, to a bound from what it clips.

    Reference: Choi et al., PACT (2018), equation 3. The gradient to the bounds exists for scalar bounds.
    """

    @staticmethod
    def forward(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(input, clip_value_max), clip_value_min)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, low, high = ctx.saved_tensors
        if low.numel() != 1 or high.numel() != 1:
            raise ConfigError(
                f"clip: learned bounds can only be scalar: got shapes {tuple(low.shape)} and {tuple(high.shape)}; expected one element each"
            )
        above_low, below_high = input > low, input < high
        bounds = [
            (grads[0] * ~inside)
            .sum(dtype=compute_dtype(bound.dtype))
            .to(bound.dtype)
            .reshape(bound.shape)
            if needed
            else None
            for bound, inside, needed in zip(
                (low, high), (above_low, below_high), ctx.needs_input_grad[1:], strict=True
            )
        ]
        return grads[0] * (above_low & below_high), *bounds


def clip(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    """``input`` between two bounds that broadcast; see :class:`ClipFunction` for the gradients.

    Raises:
        ConfigError: in backward, bounds of more than one element.
    """
    return ClipFunction.apply(input, clip_value_min, clip_value_max)
