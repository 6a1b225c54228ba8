"""The small modules that stand between integer layers in a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from torchq.deployment.base import eager
from torchq.deployment.bound import KeepsBound
from torchq.deployment.grid import Grid
from torchq.deployment.precision import KeepsFloat32

__all__ = ["Dequantize", "GatedSiLU", "GridModule", "Lookup", "Quantize"]

#: From how many codes on a table of pairs of codes is faster.
_MANY = 2**16


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
        return self.grid.quantize_images(x) if self.channels_last and x.dim() == 4 else self.grid.quantize(x)


class Dequantize(KeepsFloat32, GridModule):
    """Uint8 codes -> floating point of ``dtype``."""

    def __init__(self, grid: Grid, dtype: torch.dtype) -> None:
        super().__init__(grid)
        self.dtype = dtype

    def forward(self, codes: Tensor) -> Tensor:
        """Values, same shape."""
        return self.grid.dequantize(codes).to(self.dtype)


class GatedSiLU(GridModule):
    """``x * sigmoid(x)`` with the sigmoid on a grid."""

    def forward(self, x: Tensor) -> Tensor:
        """Values, same shape."""
        return x * self.grid.dequantize(self.grid.quantize(torch.sigmoid(x))).to(x.dtype)


class Lookup(KeepsBound):
    """Uint8 codes -> uint8 codes through a table: any function of single values between two grids, exactly.

    Args:
        function: elementwise.
        before, after: the grids.
        dtype: that the function computes in.

    Attributes:
        table: uint8, (256,): the result for each code.
    """

    table: Tensor

    def __init__(self, function: Callable[[Tensor], Tensor], before: Grid, after: Grid, dtype: torch.dtype) -> None:
        super().__init__()
        values = before.dequantize(torch.arange(256, dtype=torch.int32).to(torch.uint8)).to(dtype)
        self.register_buffer("table", after.quantize(function(values)))

    def forward(self, codes: Tensor) -> Tensor:
        """Same shape and memory format."""
        last = codes.dim() == 4 and codes.is_contiguous(memory_format=torch.channels_last)
        x = codes.permute(0, 2, 3, 1) if last else codes
        flat = x.reshape(-1)
        # Four times faster than indexing; another two by looking up pairs, in a table that is worth loading for many.
        if eager(flat) and flat.numel() >= _MANY and not flat.numel() % 2 and not flat.storage_offset() % 2:
            y = torch.index_select(self._bound("pairs", self._pairs), 0, flat.view(torch.uint16).int()).view(torch.uint8)
        else:
            y = torch.index_select(self.table, 0, flat.int())
        y = y.view(x.shape)
        return y.permute(0, 3, 1, 2) if last else y

    def _pairs(self) -> Tensor:
        """The two results, as 16 bits, for each pair of codes."""
        both = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).long()
        return self.table[both].view(torch.int16)

    def summary_row(self) -> tuple[str, int, str]:
        """For :func:`torchq.summary`."""
        return "table uint8 -> uint8", self.table.numel(), "an activation between two grids"
