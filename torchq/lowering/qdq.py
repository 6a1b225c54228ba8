"""The modules that convert between floating point and uint8 codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchq.lowering.layer import (
    Float32ParamsMixin,
    IntegerModule,
    QParamsStateMixin,
    smallest_value,
)
from torchq.lowering.qparams import QParams


class QParamsModule(QParamsStateMixin):
    """Base of modules with one :class:`QParams`."""

    qparams_names = ("qparams",)

    def __init__(self, qparams: QParams) -> None:
        super().__init__()
        self.qparams = qparams

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return str(self.qparams)


class Quantize(QParamsModule, IntegerModule):
    """Quantization of a floating-point tensor to uint8 codes.

    Attributes:
        finite: no value can be NaN, as all of them are made from codes; nobody looks for it.
    """

    finite = False

    def __init__(self, qparams: QParams, dtype: torch.dtype | None = None) -> None:
        super().__init__(qparams)
        self.dtype = dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.dtype is not None:
            self.dtype = fn(torch.zeros(0, dtype=self.dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """See :meth:`IntegerModule.propagate_qparams`; the input is floating point."""
        return self.qparams

    def forward(self, x: Tensor) -> Tensor:
        """Return the codes of ``x``, of the same shape."""
        if not (self.finite and x.dtype is torch.float32):
            smallest_value(x, self.dtype, "Quantize")
        return self.qparams.quantize(x)


class Dequantize(Float32ParamsMixin, QParamsModule, IntegerModule):
    """Dequantization of uint8 codes to a floating-point tensor."""

    def __init__(self, qparams: QParams, dtype: torch.dtype) -> None:
        super().__init__(qparams)
        self.dtype = dtype

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """See :meth:`IntegerModule.propagate_qparams`; the output is floating point."""
        if inputs[0] is not None:
            self.qparams = inputs[0]
        return None

    def forward(self, codes: Tensor) -> Tensor:
        """Return the values of ``codes``, of the same shape."""
        return self.qparams.dequantize(codes).to(self.dtype)
