"""Quantization parameters: what the uint8 codes of a tensor stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq.formats import IntFormat, PerTensor
from torchq.nn import TensorQuantizer

#: Kernels read unsigned codes, so a signed code q is stored as q + 128.
SIGNED_ZERO_POINT = 128

# Adding 1.5 * 2**23 to a float32 of magnitude below 2**22 rounds it to an integer, ties to even,
# and leaves that integer in the low bits of the mantissa: one pass over memory instead of the two
# of rounding and a (slow) conversion to uint8.
_ROUND = 1.5 * 2.0**23
# Zero points are added with it, but for the last bit: an odd one would turn ties to odd codes.
_OFFSETS = {
    point: torch.tensor(_ROUND + point, dtype=torch.float32, device="cpu")
    for point in range(0, 256, 2)
}


@dataclass(frozen=True)
class ByteQParams:
    """The mapping of real values to uint8 codes: real value = (code - zero_point) * scale.

    Attributes:
        scale: the distance of neighbouring values, > 0.
        zero_point: the code of 0.0, 0 to 255: that of an asymmetric range; else 0 where no value is
            negative, and 128 elsewhere.
        quant_min: the smallest code that is used, 0 to 255.
        quant_max: the largest code that is used, 0 to 255. A dead range has
            ``quant_min == quant_max == zero_point``.

    Example:
        >>> ByteQParams(0.5, 128, 0, 255).quantize(torch.tensor([-1.0, 0.2, 0.3, 100.0]))
        tensor([126, 128, 129, 255], dtype=torch.uint8)
    """

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int

    @classmethod
    def of(cls, quantizer: TensorQuantizer) -> ByteQParams | str:
        """Return the quantization parameters of a calibrated quantizer, or why there are none.

        The codes are those that the simulation rounds to.
        """
        d = quantizer.descriptor
        if not isinstance(d.format, IntFormat) or d.format.bits > 8:
            return f"format {d.format} has no 8-bit integer kernel"
        if not isinstance(d.granularity, PerTensor) or quantizer.amax.numel() != 1:
            return "activations have more than one range"
        if d.rounding != "half_even":
            return f"activations are rounded {d.rounding}"
        if quantizer.delegate is not None:
            return "a quantizer has a delegate"
        if bool(quantizer.dead_ranges()):
            return cls(1.0, 0, 0, 0)
        qparams = quantizer.qparams()
        shift = SIGNED_ZERO_POINT if d.format.signed else 0
        codes = qparams.zero_point, qparams.quant_min, qparams.quant_max
        return cls(float(qparams.scale), *(shift + int(code) for code in codes))

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest real value."""
        low = self.quant_min - self.zero_point
        high = self.quant_max - self.zero_point
        return low * self.scale, high * self.scale

    @property
    def saturates_by_itself(self) -> bool:
        """True where all codes of uint8 are used, so that no kernel needs to clamp."""
        return (self.quant_min, self.quant_max) == (0, 255)

    def clamped(
        self, low: float, high: float, *, keep_zero: bool = False
    ) -> ByteQParams:
        """Return the quantization parameters of values that are clamped before.

        Exact, because rounding and clamping keep the order of values. Where no negative value is
        left the codes start at 0, the form that kernels are fastest with.

        Args:
            low: the smallest value after clamping.
            high: the largest value after clamping.
            keep_zero: keep the zero point.
        """
        quant_min = self._code(low)
        quant_max = self._code(high)
        if quant_min < self.zero_point or keep_zero:
            return replace(self, quant_min=quant_min, quant_max=quant_max)
        return ByteQParams(
            self.scale, 0, quant_min - self.zero_point, quant_max - self.zero_point
        )

    def joined(self, other: ByteQParams) -> ByteQParams:
        """Return the quantization parameters of codes of either, which differ in bounds alone."""
        return replace(
            self,
            quant_min=min(self.quant_min, other.quant_min),
            quant_max=max(self.quant_max, other.quant_max),
        )

    def _code(self, value: float) -> int:
        """Return the code of a value; infinities saturate."""
        if math.isnan(value):
            return self.quant_min
        low = self.quant_min - self.zero_point
        high = self.quant_max - self.zero_point
        return self.zero_point + round(min(max(value / self.scale, low), high))

    def quantize(self, x: Tensor) -> Tensor:
        """Return the codes of a floating-point tensor, divided by the scale as simulations are.

        A product with ``1 / scale`` would differ where sums of codes lie at ties, which is common:
        ranges that a histogram gave are short binary fractions.

        Args:
            x: any shape and floating dtype; NaN becomes an arbitrary code.

        Returns:
            uint8, the shape and memory format of ``x``.
        """
        low, high = self.bounds
        # A call that changes nothing costs 2 us.
        x = x.detach() if x.requires_grad else x
        x, odd = torch.clamp(x.to(torch.float32), low, high), self.zero_point % 2
        offset = _OFFSETS[self.zero_point - odd]
        # Its low bytes are the codes.
        rounded = x.div_(self.scale).add_(offset).view(torch.int32)
        return (rounded.add_(1) if odd else rounded).to(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32, of the same shape."""
        if self.zero_point == 0:
            return codes * self.scale
        return codes.to(torch.float32).sub_(self.zero_point).mul_(self.scale)
