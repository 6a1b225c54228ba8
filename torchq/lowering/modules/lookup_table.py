"""Elementwise functions of uint8 codes as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchq.lowering.modules.base import IntegerModule, QParamsStateMixin
from torchq.lowering.modules.bound_kernels import KernelCacheMixin
from torchq.lowering.modules.input_checks import eager
from torchq.lowering.ops.lookup import lookup, pair_table, takes_pairs
from torchq.lowering.qparams import QParams

__all__ = ["LookupTable"]


class LookupTable(KernelCacheMixin, QParamsStateMixin, IntegerModule):
    """An elementwise function of uint8 codes as a table of its 256 results.

    Exact for any function of single values: each code stands for one value, and the result is what
    the simulation rounds the function of that value to.

    Args:
        function: elementwise.
        input_qparams: of the codes that are read.
        output_qparams: of the codes that are returned.
        dtype: the dtype that the function computes in.

    Attributes:
        table: uint8, (256,): the result for each code.

    Shape:
        Any, uint8 -> the same shape and memory format, uint8.
    """

    qparams_names = ("input_qparams", "output_qparams")
    table: Tensor

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        input_qparams: QParams,
        output_qparams: QParams,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.input_qparams, self.output_qparams = input_qparams, output_qparams
        codes = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
        values = input_qparams.dequantize(codes).to(dtype)
        self.register_buffer("table", output_qparams.quantize(function(values)))

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """See :meth:`IntegerModule.propagate_qparams`; a moved zero point moves the entries."""
        new = inputs[0]
        if new is not None and new != self.input_qparams:
            assert new.scale == self.input_qparams.scale, "passes move zero points and bounds alone"
            codes = torch.arange(256, device=self.table.device)
            before = codes - new.zero_point + self.input_qparams.zero_point
            # Entries beyond the table belong to codes that the new bounds rule out.
            self.table = self.table[before.clamp(0, 255)]
            self.input_qparams = new
        return self.output_qparams

    def forward(self, codes: Tensor) -> Tensor:
        """Return the table's entries for ``codes``."""
        last = codes.dim() == 4 and codes.is_contiguous(memory_format=torch.channels_last)
        x = codes.permute(0, 2, 3, 1) if last else codes
        flat = x.reshape(-1)
        table = self.table
        if eager(flat) and takes_pairs(flat):
            table = self._kernel("pairs", lambda: pair_table(self.table))
        y = lookup(flat, table).view(x.shape)
        return y.permute(0, 3, 1, 2) if last else y

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        return "table uint8 -> uint8", self.table.numel(), "an activation between two quantizers"
