"""Clipping as a module, with bounds that may be learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.compat.pytorch_quantization.nn.functional import clip
from torchq.errors import ConfigError


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
                self.register_buffer(
                    name, torch.as_tensor(value, dtype=torch.float32), persistent=False
                )
        self._active = True

    def disable(self) -> None:
        """Let the input pass."""
        self._active = False

    def enable(self) -> None:
        """Clip."""
        self._active = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` between the bounds."""
        return clip(inputs, self.clip_value_min, self.clip_value_max) if self._active else inputs


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, Tensor) or getattr(value, "size", 1) != 1:
        raise ConfigError(
            f"{name}: a learned bound must be scalar: got {value!r}; expected a float"
        )
    return float(value.item() if hasattr(value, "item") else value)
