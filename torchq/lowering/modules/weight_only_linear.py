"""The linear layer whose weight alone is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.lowering.modules.base import DeployedLayer
from torchq.lowering.modules.input_checks import require_dtype
from torchq.lowering.ops.weight_only import MAX_ROWS, BlockWeights, pack_int4, weight_only_linear

__all__ = ["WeightOnlyLinear"]


class WeightOnlyLinear(DeployedLayer):
    """The linear layer ``x @ (codes * scale).T + bias`` with int8 codes, or int4 two in a byte.

    Args:
        codes: int8, (out, in).
        scale: float32, (out, blocks): one for each run of ``in / blocks`` inputs.
        bias: (out,) or None.
        bits: width of the codes; up to 4 they are stored two in a byte.
        dtype: of :attr:`weight`.

    Shape:
        (..., in) floating point -> (..., out), same dtype. On a CPU up to 16 rows run on torch's
        weight-only kernels, which read the integers; these multiply in the dtype of the input with
        float32 sums.
    """

    def __init__(
        self, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, dtype: torch.dtype
    ) -> None:
        stored = 4 if bits <= 4 and codes.shape[1] % 2 == 0 else 8
        bias = None if bias is None else bias.detach().clone()
        super().__init__(pack_int4(codes) if stored == 4 else codes, scale, bias, dtype)
        self.bits = stored

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``.

        Raises:
            TypeError: ``x`` has another dtype than the layer.
        """
        require_dtype(x, self.dtype, "WeightOnlyLinear")
        return weight_only_linear(x, self._block_weights())

    def _block_weights(self) -> BlockWeights:
        return BlockWeights(self.weight_codes, self.weight_scale, self.bias, self.bits)

    def _dequantized_weight(self) -> Tensor:
        return self._block_weights().values()

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        note = f"integers are read for up to {MAX_ROWS} rows"
        return f"weight-only int{self.bits}", self._size(), note

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        out, blocks = self.weight_codes.shape[0], self.weight_scale.shape[1]
        return f"out={out}, int{self.bits}, blocks={blocks}"
