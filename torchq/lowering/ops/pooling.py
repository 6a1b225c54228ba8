"""Max pooling of uint8 images: ``torch.ops.torchq.max_pool2d``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["max_pool2d"]

#: The channels that torch's kernel computes at once.
_AT_ONCE = 32

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation,"
    " bool ceil_mode) -> Tensor"
)


def max_pool2d(x: Tensor, window: Sequence[Sequence[int]], ceil_mode: bool) -> Tensor:
    """Return the largest code of each window by ``torch.ops.torchq.max_pool2d``.

    Args:
        x: uint8, (N, C, H, W) or (C, H, W).
        window: kernel size, stride, padding and dilation, each for height and width.
        ceil_mode: as in :class:`torch.nn.MaxPool2d`.
    """
    return torch.ops.torchq.max_pool2d(x, *window, ceil_mode)


def _anywhere(x: Tensor, *window: Any) -> Tensor:
    kernel, stride, padding, dilation = map(tuple, window[:4])
    return F.max_pool2d(x.float(), kernel, stride, padding, dilation, window[4]).to(torch.uint8)


def _cpu(x: Tensor, *window: Any) -> Tensor:
    # torch's own max_pool2d refuses uint8 images that are channels last. This operator for
    # quantized tensors takes plain ones as well and is ten times faster.
    if not x.numel() or x.dim() != 4 or not hasattr(torch.ops.quantized, "max_pool2d"):
        return _anywhere(x, *window)
    channels, last = x.shape[1], torch.channels_last
    missing = -channels % _AT_ONCE
    if not missing or not x.is_contiguous(memory_format=last):
        return torch.ops.quantized.max_pool2d(x, *window)
    # The channels that are left over are computed one by one: five times slower than padding.
    pooled = torch.ops.quantized.max_pool2d(F.pad(x, [0, 0, 0, 0, 0, missing]), *window)
    return pooled[:, :channels].contiguous(memory_format=last)


_LIBRARY.impl("max_pool2d", _anywhere, "CompositeExplicitAutograd")
_LIBRARY.impl("max_pool2d", _cpu, "CPU")
torch.library.register_fake("torchq::max_pool2d", _anywhere, lib=_LIBRARY)
