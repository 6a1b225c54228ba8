"""Conversions of a deployed model to another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["KeepsFloat32"]


class KeepsFloat32(nn.Module):
    """Mixin for layers whose scales must stay float32: ``model.to(torch.bfloat16)`` changes the dtype of results alone.

    Attributes:
        dtype: of floating-point results.
    """

    dtype: torch.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {
            name: buffer
            for name, buffer in self.named_buffers(recurse=False)
            if buffer.dtype is torch.float32
        }
        super()._apply(fn, recurse)
        self.dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype
        for name, buffer in kept.items():
            now = self.get_buffer(name)
            if now.dtype is not torch.float32:
                setattr(self, name, buffer.to(now.device))
        return self
