"""The uint8 codes that stand for a tensor: real value = (code - zero_point) * scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq.formats import IntFormat, PerTensor
from torchq.functional.scale import TINY
from torchq.nn import TensorQuantizer

__all__ = ["QParams", "SIGNED_ZERO"]

#: Kernels want unsigned input, so a signed code q is stored as q + 128.
SIGNED_ZERO = 128

# Adding 1.5 * 2**23 to a float32 of magnitude below 2**22 rounds it to an integer, ties to even, and leaves that integer in the low
# mantissa bits: one pass over memory instead of the three of multiply, round and a (slow) conversion to uint8.
_ROUND = 1.5 * 2.0**23
#: How many float32 numbers fit a core's cache well.
_CACHED = 2**17
_OFFSETS = {zero: torch.tensor(_ROUND + zero) for zero in (0, SIGNED_ZERO)}


@dataclass(frozen=True)
class QParams:
    """How real values map to uint8 codes.

    Attributes:
        scale: distance of neighbouring values, > 0.
        zero_point: the code of 0.0: 0 where no value is negative, else 128.
        quant_min, quant_max: the codes that are used, within 0 .. 255; a dead range has ``quant_min == quant_max == zero_point``.

    Example:
        >>> QParams(0.5, 128, 0, 255).quantize(torch.tensor([-1.0, 0.2, 0.3, 100.0]))
        tensor([126, 128, 129, 255], dtype=torch.uint8)
    """

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int

    @classmethod
    def of(cls, quantizer: TensorQuantizer) -> QParams | str:
        """The qparams of a calibrated quantizer, or why there is none. Its codes are those that the simulation rounds to."""
        d = quantizer.descriptor
        if not isinstance(d.format, IntFormat) or d.format.bits > 8:
            return f"format {d.format} has no 8-bit integer kernel"
        if not isinstance(d.granularity, PerTensor) or quantizer.amax.numel() != 1:
            return "activations have more than one range"
        amax = float(quantizer.amax.detach()) * (d.scale_amax or 1.0)
        if amax <= TINY:
            return cls(1.0, 0, 0, 0)
        zero = SIGNED_ZERO if d.format.signed else 0
        return cls(
            float(quantizer.calculate_qparams()[0]),
            zero,
            zero + int(d.format.quant_min),
            zero + int(d.format.quant_max),
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest real value."""
        return (self.quant_min - self.zero_point) * self.scale, (
            self.quant_max - self.zero_point
        ) * self.scale

    @property
    def saturates_by_itself(self) -> bool:
        """Whether the bounds of uint8 are the bounds of the qparams."""
        return (self.quant_min, self.quant_max) == (0, 255)

    def clamped(self, low: float, high: float, *, keep_zero: bool = False) -> QParams:
        """The qparams of values that were clamped to ``[low, high]`` before. Exact: rounding and clamping keep order.

        Where nothing negative is left the codes start at 0, the form that kernels like best, unless ``keep_zero``.
        """
        limits = [
            self.zero_point
            + _round(
                bound / self.scale,
                self.quant_min - self.zero_point,
                self.quant_max - self.zero_point,
            )
            for bound in (low, high)
        ]
        qparams = replace(self, quant_min=limits[0], quant_max=limits[1])
        if qparams.quant_min < qparams.zero_point or keep_zero:
            return qparams
        return QParams(
            self.scale,
            0,
            qparams.quant_min - qparams.zero_point,
            qparams.quant_max - qparams.zero_point,
        )

    def quantize(self, x: Tensor) -> Tensor:
        """Codes of a floating-point tensor, uint8, x's shape and memory format. NaN becomes an arbitrary code."""
        low, high = self.bounds
        x = torch.clamp(x.detach().to(torch.float32), low, high)
        if (
            torch.compiler.is_compiling()
        ):  # fused there, and reinterpreting bits would be in the way
            return torch.round(x * (1.0 / self.scale)).add(self.zero_point).to(torch.uint8)
        return self._rounded_(x).to(torch.uint8)

    def quantize_images(self, x: Tensor) -> Tensor:
        """:meth:`quantize` of (N, C, H, W), channels last in memory.

        A few images at a time: what is computed between then stays in the cache, and is not new memory at every call.
        """
        count = (
            0 if torch.compiler.is_compiling() else max(1, _CACHED // max(1, x.shape[1:].numel()))
        )
        if not count or len(x) <= count:
            return self.quantize(x.contiguous(memory_format=torch.channels_last))
        codes = torch.empty(
            x.shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last
        )
        values = torch.empty(
            (count, *x.shape[1:]), device=x.device, memory_format=torch.channels_last
        )
        for images, result in zip(x.detach().split(count), codes.split(count), strict=True):
            some = values[: len(images)].copy_(images).clamp_(*self.bounds)
            result.copy_(self._rounded_(some))
        return codes

    def _rounded_(self, x: Tensor) -> Tensor:
        """Integers whose low bytes are the codes, in the memory of clamped float32 values."""
        return torch.add(_OFFSETS[self.zero_point], x, alpha=1.0 / self.scale, out=x).view(
            torch.int32
        )

    def dequantize(self, codes: Tensor) -> Tensor:
        """Float32 values of codes."""
        if self.zero_point == 0:
            return codes * self.scale
        return codes.to(torch.float32).sub_(self.zero_point).mul_(self.scale)


def _round(value: float, low: int, high: int) -> int:
    """To the nearest integer in ``[low, high]``, ties to even; infinities saturate."""
    return round(min(max(value, low), high)) if not math.isnan(value) else low
