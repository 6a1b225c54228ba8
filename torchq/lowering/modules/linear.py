"""The integer linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.lowering.modules.base import Int8Layer, eager
from torchq.lowering.ops import onednn
from torchq.lowering.ops.onednn import Run
from torchq.lowering.ops.schemas import int8_linear

__all__ = ["Int8Linear"]


class Int8Linear(Int8Layer):
    """An integer linear layer; the arguments are those of :class:`Int8Layer`.

    Shape:
        (..., in), float or uint8 codes -> (..., out).
    """

    kind = "linear"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``activation(x @ weight.T + bias)``."""
        if x.dtype is not torch.uint8:
            if (twin := self.unsigned_twin(x)) is not None:
                return twin(x)
            x = self.codes(x)
        if not eager(x):
            return self._dispatched(x)
        empty = not x.numel()
        run: Run = self._kernels.get(empty) or self._kernel(empty, lambda: self._bind(empty))
        return run(x)

    def _bind(self, empty: bool) -> Run:
        """Return the layer as a function of the codes."""
        if empty or not onednn.available():
            return self._dispatched
        run = onednn.bind_linear(self.int8_weights(), self.epilogue())
        return run if self.finished else lambda x: self.finish(run(x))

    def _dispatched(self, x: Tensor) -> Tensor:
        return self.finish(int8_linear(x, self.int8_weights(), self.epilogue()))
