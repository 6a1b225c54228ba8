"""Clipping with gradients to its bounds, as a function and as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from torchq.compat.traces import applied
from torchq.errors import ConfigError
from torchq.functional import compute_dtype


class ClipFunction(torch.autograd.Function):
    """``min(max(input, minimum), maximum)`` with bounds that broadcast.

    The input has the gradient 1 strictly inside the bounds. A scalar bound has the gradient of
    all elements that it clips.

    Reference: Choi et al., PACT (2018), equation 3.
    """

    @staticmethod
    def forward(
        input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor
    ) -> Tensor:
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
        is_above = input > minimum
        is_below = input < maximum
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
    """Return ``input`` between bounds that broadcast; gradients as of :class:`ClipFunction`."""
    return applied(ClipFunction, input, clip_value_min, clip_value_max)


class Clip(nn.Module):
    """``clip(inputs, clip_value_min, clip_value_max)``.

    Args:
        clip_value_min: the lower bound, a number or a tensor.
        clip_value_max: the upper bound, a number or a tensor.
        learn_min: make the lower bound a scalar parameter that starts at this value.
        learn_max: make the upper bound a scalar parameter that starts at this value.

    Raises:
        ConfigError: a learned bound that is neither a float nor an array of one element.
    """

    clip_value_min: Tensor
    clip_value_max: Tensor

    def __init__(
        self,
        clip_value_min: Any,
        clip_value_max: Any,
        learn_min: bool = False,
        learn_max: bool = False,
    ) -> None:
        super().__init__()
        for name, value, learned in (
            ("clip_value_min", clip_value_min, learn_min),
            ("clip_value_max", clip_value_max, learn_max),
        ):
            if learned:
                setattr(self, name, nn.Parameter(torch.tensor(_scalar(name, value))))
            else:
                # A buffer follows the module to a device. As in the original it is not saved.
                fixed = torch.as_tensor(value, dtype=torch.float32)
                self.register_buffer(name, fixed, persistent=False)
        self._active = True

    def disable(self) -> None:
        """Let the input pass."""
        self._active = False

    def enable(self) -> None:
        """Clip."""
        self._active = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` between the bounds."""
        return (
            clip(inputs, self.clip_value_min, self.clip_value_max)
            if self._active
            else inputs
        )


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, Tensor) or getattr(value, "size", 1) != 1:
        raise ConfigError(
            f"{name}: a learned bound must be scalar: got {value!r}; expected a float"
        )
    return float(value.item() if hasattr(value, "item") else value)
