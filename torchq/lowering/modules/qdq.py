"""The small modules that stand between integer layers in a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from torchq.lowering.modules.base import eager
from torchq.lowering.modules.float32_params import KeepsFloat32
from torchq.lowering.modules.kernel_cache import KeepsBound
from torchq.lowering.qparams import QParams

__all__ = ["Dequantize", "GatedSiLU", "QParamsModule", "Lookup", "Quantize"]

#: From how many codes on a table of pairs of codes is faster.
_MANY = 2**16


class QParamsModule(nn.Module):
    """Base: a module with a qparams that is part of its state dict."""

    def __init__(self, qparams: QParams) -> None:
        super().__init__()
        self.qparams = qparams

    def get_extra_state(self) -> dict[str, Any]:
        """The qparams as plain numbers."""
        return {"qparams": astuple(self.qparams)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        self.qparams = QParams(*state["qparams"])

    def extra_repr(self) -> str:
        return str(self.qparams)


class Quantize(QParamsModule):
    """Floating point -> uint8 codes.

    Attributes:
        channels_last: bring images into the layout of convolutions first.
    """

    channels_last = False

    def forward(self, x: Tensor) -> Tensor:
        """Codes, x's shape."""
        return (
            self.qparams.quantize_images(x)
            if self.channels_last and x.dim() == 4
            else self.qparams.quantize(x)
        )


class Dequantize(KeepsFloat32, QParamsModule):
    """Uint8 codes -> floating point of ``dtype``."""

    def __init__(self, qparams: QParams, dtype: torch.dtype) -> None:
        super().__init__(qparams)
        self.dtype = dtype

    def forward(self, codes: Tensor) -> Tensor:
        """Values, same shape."""
        return self.qparams.dequantize(codes).to(self.dtype)


class GatedSiLU(QParamsModule):
    """``x * sigmoid(x)`` with the sigmoid on a qparams."""

    def forward(self, x: Tensor) -> Tensor:
        """Values, same shape."""
        return x * self.qparams.dequantize(self.qparams.quantize(torch.sigmoid(x))).to(x.dtype)


class Lookup(KeepsBound):
    """Uint8 codes -> uint8 codes through a table: any function of single values between two qparams, exactly.

    Args:
        function: elementwise.
        before, after: the qparams.
        dtype: that the function computes in.

    Attributes:
        table: uint8, (256,): the result for each code.
    """

    table: Tensor

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        before: QParams,
        after: QParams,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        values = before.dequantize(torch.arange(256, dtype=torch.int32).to(torch.uint8)).to(dtype)
        self.register_buffer("table", after.quantize(function(values)))

    def forward(self, codes: Tensor) -> Tensor:
        """Same shape and memory format."""
        last = codes.dim() == 4 and codes.is_contiguous(memory_format=torch.channels_last)
        x = codes.permute(0, 2, 3, 1) if last else codes
        flat = x.reshape(-1)
        # Four times faster than indexing; another two by looking up pairs, in a table that is worth loading for many.
        if (
            eager(flat)
            and flat.numel() >= _MANY
            and not flat.numel() % 2
            and not flat.storage_offset() % 2
        ):
            y = torch.index_select(
                self._bound("pairs", self._pairs), 0, flat.view(torch.uint16).int()
            ).view(torch.uint8)
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
        return "table uint8 -> uint8", self.table.numel(), "an activation between two qparams"
