"""The integer linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.lowering.modules.base import Int8Layer, eager
from torchq.lowering.ops import onednn
from torchq.lowering.ops.onednn import Run

__all__ = ["Int8Linear"]


class Int8Linear(Int8Layer):
    """An integer linear layer.

    Shape:
        (..., in), float or uint8 codes -> (..., out).
    """

    kind = "linear"

    def forward(self, x: Tensor) -> Tensor:
        """``activation(x @ weight.T + bias)``."""
        if x.dtype is not torch.uint8:
            if (twin := self.unsigned_twin(x)) is not None:
                return twin(x)
            x = self.codes(x)
        if eager(x):
            empty = not x.numel()
            run: Run = self._kernels.get(empty) or self._kernel(empty, lambda: self._bind(empty))
            return run(x)
        return self._dispatched(x)

    def _bind(self, empty: bool) -> Run:
        if empty or not onednn.available():
            return self._dispatched
        run = onednn.bind_linear(*self._layer())
        return run if self.finished else lambda x: self.finish(run(x))

    def _layer(self) -> tuple[Any, ...]:
        qparams = self.input_qparams
        return (
            self.weight_codes,
            self.weight_scale,
            self.bias,
            qparams.scale,
            qparams.zero_point,
            *self.output_arguments(),
        )

    def _dispatched(self, x: Tensor) -> Tensor:
        return self.finish(torch.ops.torchq.int8_linear(x, *self._layer()))
