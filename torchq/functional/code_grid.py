"""The grid of one fixed range, made once for many calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchq.functional.kernels.tiled import tiles
from torchq.functional.qparams import QParams


@dataclass(frozen=True, eq=False)
class CodeGrid:
    """What a tensor with one fixed range of integer codes is rounded to.

    Attributes:
        qparams: one scale, > 0, one zero point, and the format.
        scale: that of ``qparams``, without dimensions.
        low: the smallest code less the zero point.
        high: the largest one.
    """

    qparams: QParams
    scale: Tensor
    low: float
    high: float

    @classmethod
    def of(cls, qparams: QParams) -> CodeGrid:
        """Return the grid of quantization parameters; the host waits for their device."""
        zero_point = float(qparams.zero_point)
        return cls(
            qparams,
            qparams.scale.detach().reshape(()),
            qparams.quant_min - zero_point,
            qparams.quant_max - zero_point,
        )

    @property
    def largest(self) -> float:
        """The largest magnitude of a code less the zero point."""
        return max(-self.low, self.high)

    @cached_property
    def reciprocal(self) -> Tensor:
        """One over the scale, rounded to float32."""
        return self.scale.reciprocal()

    def codes(self, x: Tensor, *, by_reciprocal: bool = False) -> Tensor:
        """Return the codes of float32 values less the zero point, in a new float32 tensor.

        Kernels that multiply by the reciprocal of the scale give other codes to a few values near a
        tie, and to no value of a code.
        """
        codes = torch.empty_like(x)
        if by_reciprocal:
            for part, values in tiles(codes, x):
                torch.mul(values, self.reciprocal, out=part).round_()
                part.clamp_(self.low, self.high)
            return codes
        for part, values in tiles(codes, x):
            torch.div(values, self.scale, out=part).round_().clamp_(self.low, self.high)
        return codes

    def values(self, x: Tensor) -> Tensor:
        """Return float32 values rounded to the grid, in a new tensor."""
        rounded = torch.empty_like(x)
        for part, values in tiles(rounded, x):
            torch.div(values, self.scale, out=part).round_()
            part.clamp_(self.low, self.high).mul_(self.scale)
        return rounded

    def codes_of_values(self, values: Tensor) -> Tensor | None:
        """Return the codes of values that lie on the grid; None where one does not."""
        codes = torch.div(values, self.scale).round_()
        return codes if torch.equal(codes * self.scale, values) else None
