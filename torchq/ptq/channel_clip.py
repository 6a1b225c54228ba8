"""Clipping with limits of each channel: what ReLU6 becomes where channels have factors.

``clip(x, low, high) = s * clip(x / s, low / s, high / s)`` for s > 0, so limits that take the
factors let them pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import Call, Flow
from torchq.ptq.channels import TRANSPOSED

__all__ = ["CLIP_MODULES", "ChannelClip", "may_clip", "replace_clips"]

# Modules that clip with the same limits everywhere.
_CLIPS = (nn.Hardtanh, nn.ReLU6)
#: Function that clips with the same limits everywhere -> the module that does the same.
CLIP_MODULES = {"relu6": "nn.ReLU6", "hardtanh": "nn.Hardtanh"}


class ChannelClip(nn.Module):
    """Clips every channel to limits of its own.

    Args:
        clip: the module whose limits are taken: a Hardtanh or ReLU6.
        layer: the layer that makes the channels; it says how many there are, and where.

    Example:
        >>> clip = ChannelClip(nn.ReLU6(), nn.Linear(4, 2))
        >>> clip.multiply_(torch.tensor([0.5, 1.0]))
        >>> clip(torch.tensor([9.0, 9.0]))
        tensor([3., 6.])
    """

    low: Tensor
    high: Tensor

    def __init__(self, clip: nn.Hardtanh, layer: Any) -> None:
        super().__init__()
        weight = layer.weight
        count = layer.out_channels if isinstance(layer, TRANSPOSED) else len(weight)
        # Channels come before the spatial dimensions, with and without a batch.
        shape = (count, *[1] * (weight.dim() - 2))
        for name, value in (("low", clip.min_val), ("high", clip.max_val)):
            self.register_buffer(name, torch.full(shape, value, dtype=weight.dtype).to(weight))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, clipped."""
        return x.maximum(self.low).minimum(self.high)

    def multiply_(self, factor: Tensor) -> None:
        """Multiply the limits by factors of the channels, in place.

        Args:
            factor: (channels,), > 0.
        """
        for limit in (self.low, self.high):
            limit.mul_(factor.to(limit.dtype).view_as(limit))


def may_clip(flow: Flow, call: Call) -> bool:
    """Return True if a call is the only one of a module that clips and can take factors."""
    module = call.module
    is_clip = type(module) in _CLIPS or isinstance(module, ChannelClip)
    return module is not None and is_clip and len(flow.calls_of(module)) == 1


def replace_clips(model: nn.Module, clips: Iterable[tuple[str, Any]], undo: ExitStack) -> None:
    """Give modules that clip limits of each channel.

    Args:
        model: changed in place.
        clips: paths of the modules, each with the layer that makes its channels.
        undo: gets what brings the modules back.
    """
    for path, layer in clips:
        clip: Any = model.get_submodule(path)
        if isinstance(clip, ChannelClip):
            continue
        parent_name, _, child = path.rpartition(".")
        parent = model.get_submodule(parent_name)
        undo.callback(setattr, parent, child, clip)
        setattr(parent, child, ChannelClip(clip, layer).train(clip.training))
