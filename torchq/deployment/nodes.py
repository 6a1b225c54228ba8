"""The small modules that stand between integer layers in a chain."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from torchq.deployment.grid import Grid

__all__ = ["CodesMaxPool2d", "Dequantize", "GridModule", "Quantize"]


class GridModule(nn.Module):
    """Base: a module with a grid that is part of its state dict."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def get_extra_state(self) -> dict[str, Any]:
        """The grid as plain numbers."""
        return {"grid": astuple(self.grid)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        self.grid = Grid(*state["grid"])

    def extra_repr(self) -> str:
        return str(self.grid)


class Quantize(GridModule):
    """Floating point -> uint8 codes.

    Attributes:
        channels_last: bring images into the layout of convolutions first.
    """

    channels_last = False

    def forward(self, x: Tensor) -> Tensor:
        """Codes, x's shape."""
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.grid.quantize(x)


class Dequantize(GridModule):
    """Uint8 codes -> floating point of ``dtype``."""

    def __init__(self, grid: Grid, dtype: torch.dtype) -> None:
        super().__init__(grid)
        self.dtype = dtype

    def forward(self, codes: Tensor) -> Tensor:
        """Values, same shape."""
        return self.grid.dequantize(codes).to(self.dtype)


class CodesMaxPool2d(nn.MaxPool2d):
    """Max pooling of uint8 codes; rounding keeps order, so it commutes with quantization."""

    def forward(self, input: Tensor) -> Tensor:
        """Largest code of each window; (N, C, H, W) or (C, H, W)."""
        pairs = [_pair(v) for v in (self.kernel_size, self.stride, self.padding, self.dilation)]
        return torch.ops.torchq.max_pool2d(input, *pairs, self.ceil_mode)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
