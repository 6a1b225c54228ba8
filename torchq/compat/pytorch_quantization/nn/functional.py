"""Clipping with gradients to its bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.errors import ConfigError
from torchq.functional import compute_dtype


class ClipFunction(torch.autograd.Function):
    """``min(max(input, minimum), maximum)`` with bounds that broadcast.

    The input has the gradient 1 strictly inside the bounds. A scalar bound has the gradient of
    all elements that it clips.

    Reference: Choi et al., PACT (2018), equation 3.
    """

    @staticmethod
    def forward(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
        """Return ``input`` between the bounds."""
        return torch.maximum(torch.minimum(input, clip_value_max), clip_value_min)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of both bounds."""
        input, minimum, maximum = ctx.saved_tensors
        if minimum.numel() != 1 or maximum.numel() != 1:
            raise ConfigError(
                "clip: learned bounds can only be scalar: got shapes "
                f"{tuple(minimum.shape)} and {tuple(maximum.shape)}; expected one element each"
            )
        is_above, is_below = input > minimum, input < maximum
        _, needs_minimum, needs_maximum = ctx.needs_input_grad
        return (
            grads[0] * (is_above & is_below),
            _bound_gradient(grads[0], ~is_above, minimum) if needs_minimum else None,
            _bound_gradient(grads[0], ~is_below, maximum) if needs_maximum else None,
        )


def _bound_gradient(grad: Tensor, is_clipped: Tensor, bound: Tensor) -> Tensor:
    """Return the gradient of a scalar bound, summed over the elements that it clips."""
    total = (grad * is_clipped).sum(dtype=compute_dtype(bound.dtype))
    return total.to(bound.dtype).reshape(bound.shape)


def clip(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    """Return ``input`` between two bounds that broadcast.

    The gradients are those of :class:`ClipFunction`.

    Raises:
        ConfigError: in backward, bounds of more than one element.
    """
    return ClipFunction.apply(input, clip_value_min, clip_value_max)
