"""The GELU of uint8 codes."""

from __future__ import annotations

import torch

from torchq.lowering.modules.lookup_table import LookupTable
from torchq.lowering.ops.epilogues import ACTIVATIONS
from torchq.lowering.qparams import QParams

__all__ = ["Int8GELU"]


class Int8GELU(LookupTable):
    """GELU from uint8 codes to uint8 codes, without floating point in :meth:`forward`.

    The kernel reads one of 256 results, which :class:`LookupTable` computes when the module is
    made, so every code is the one that the simulation rounds to. The integer kernel without a
    table, the polynomial of I-BERT (Kim et al., 2021, https://arxiv.org/abs/2101.01321, equations
    6 to 8), approximates ``erf`` with an error of up to 0.018: a third of its codes differ by one
    from those of the simulation (tests/lowering/test_int8_gelu.py counts them).

    Args:
        input_qparams: of the codes that are read.
        output_qparams: of the codes that are returned.
        dtype: the dtype in which the simulation computes GELU.
        approximate: ``"none"`` or ``"tanh"``, as in :class:`torch.nn.GELU`.

    Shape:
        Any, uint8 -> the same shape and memory format, uint8.

    Example:
        >>> gelu = Int8GELU(QParams(0.05, 128, 0, 255), QParams(0.05, 128, 0, 255), torch.float32)
        >>> gelu(torch.tensor([0, 128, 228], dtype=torch.uint8))
        tensor([128, 128, 228], dtype=torch.uint8)
    """

    def __init__(
        self,
        input_qparams: QParams,
        output_qparams: QParams,
        dtype: torch.dtype,
        approximate: str = "none",
    ) -> None:
        function = ACTIVATIONS["gelu_tanh" if approximate == "tanh" else "gelu"].function
        super().__init__(function, input_qparams, output_qparams, dtype)
        self.approximate = approximate

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        note = "" if self.approximate == "none" else f"approximate={self.approximate}"
        return "int8 gelu", self.table.numel(), note

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return f"{self.input_qparams} -> {self.output_qparams}, approximate={self.approximate!r}"
