"""The integer linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.input_checks import eager
from torchq.lowering.ops import onednn
from torchq.lowering.ops.onednn import Run
from torchq.lowering.ops.schemas import int8_linear

__all__ = ["Int8Linear"]


class Int8Linear(Int8Layer):
    """An integer linear layer; the arguments are those of :class:`Int8Layer`.

    Shape:
        (..., in), float or uint8 codes -> (..., out).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``activation(x @ weight.T + bias)``.

        Raises:
            TypeError: see :meth:`Int8Layer.input_codes`.
            QuantizationError: see :meth:`Int8Layer.input_codes`.
        """
        if x.dtype is torch.uint8 and self.reads_codes:
            return self._compute(x)
        layer, codes = self.input_codes(x)
        assert isinstance(layer, Int8Linear)
        return layer._compute(codes)  # noqa: SLF001

    def _compute(self, codes: Tensor) -> Tensor:
        if not eager(codes):
            return self._dispatched(codes)
        empty = not codes.numel()
        run: Run = self._kernels.get(empty) or self._kernel(empty, lambda: self._bind(empty))
        return run(codes)

    def bound(self, *inputs: Tensor) -> Run | None:
        """See :meth:`KernelCacheMixin.bound`; only codes are read without a check."""
        x = inputs[0]
        if x.dtype is not torch.uint8 or not self.reads_codes or not x.numel():
            return None
        run: Run = self._kernel(False, lambda: self._bind(False))

        def multiply(codes: Tensor) -> Tensor:
            return run(codes) if codes.numel() else self(codes)

        return multiply

    def _bind(self, empty: bool) -> Run:
        """Return the layer as a function of the codes."""
        if empty or not onednn.available():
            return self._dispatched
        run = onednn.bind_linear(self.int8_weights(), self.epilogue())
        return self._bound(run)

    def _dispatched(self, x: Tensor) -> Tensor:
        return self.finish(int8_linear(x, self.int8_weights(), self.epilogue()))
