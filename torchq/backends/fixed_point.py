"""Integer arithmetic of chips: multipliers with a shift, in place of floating-point scales.

Everything here is exact on integers in int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchq.errors import ConfigError
from torchq.formats import check_rounding

__all__ = ["GEMMLOWP", "SINGLE_ROUNDING", "FixedPoint", "quantize_multiplier", "shift_right"]

# A multiplier that is shifted further is taken for 0.
_LARGEST_SHIFT = 31


@dataclass(frozen=True)
class FixedPoint:
    """How a chip multiplies an int32 accumulator by a real number.

    Attributes:
        scheme: "doubling": the product with a multiplier of 31 bits is rounded to its high half,
            half away from zero, and shifted right, half away from zero again. "single": the exact
            product is rounded once.
        bits: the bits of the multiplier without its sign, 1 to 31; "doubling" has 31.
        rounding: the policy of "single", one of :data:`torchq.formats.ROUNDINGS`.

    Raises:
        ConfigError: values outside these rules.
    """

    scheme: Literal["doubling", "single"] = "doubling"
    bits: int = 31
    rounding: str = "half_away"

    def __post_init__(self) -> None:
        check_rounding(self.rounding)
        if self.scheme not in ("doubling", "single"):
            raise ConfigError(
                f"FixedPoint: got scheme {self.scheme!r}; expected 'doubling' or 'single'"
            )
        if type(self.bits) is not int or not 1 <= self.bits <= 31:
            raise ConfigError(f"FixedPoint: got bits={self.bits!r}; expected 1 to 31")
        if self.scheme == "doubling" and (self.bits, self.rounding) != (31, "half_away"):
            raise ConfigError(
                f"FixedPoint: got bits={self.bits}, rounding={self.rounding!r} for 'doubling'; "
                "expected 31 bits and 'half_away'. Use scheme='single' for others"
            )

    def multiply(self, accumulator: Tensor, real: Tensor) -> Tensor:
        """Return ``accumulator * real`` as the chip rounds it.

        Args:
            accumulator: int64 with values of int32, any shape.
            real: float64 > 0 that broadcasts against it.

        Returns:
            int64, the shape of ``accumulator``.

        Example:
            >>> scale = torch.tensor(0.0049, dtype=torch.float64)
            >>> GEMMLOWP.multiply(torch.tensor([1000, -12345]), scale)
            tensor([  5, -60])
        """
        multiplier, shift = quantize_multiplier(real, self.bits)
        if self.scheme == "single":
            return shift_right(accumulator * multiplier, self.bits - shift, self.rounding)
        left, right = shift.clamp(min=0), (-shift).clamp(min=0)
        high = _doubling_high_multiply(accumulator << left, multiplier)
        return shift_right(high, right, "half_away")


#: gemmlowp, and the reference kernels of TensorFlow Lite.
GEMMLOWP = FixedPoint()
#: TensorFlow Lite built with single rounding: one shift, half up.
SINGLE_ROUNDING = FixedPoint("single", 31, "half_up")


def quantize_multiplier(real: Tensor, bits: int = 31) -> tuple[Tensor, Tensor]:
    """Return integers with ``real = multiplier * 2**(shift - bits)``, as near as the bits allow.

    Reference: ``QuantizeMultiplier`` of TensorFlow Lite, for 31 bits.

    Args:
        real: float64, >= 0 and finite, any shape.
        bits: 1 to 31.

    Returns:
        multiplier: int64 from ``2**(bits - 1)`` to ``2**bits - 1``; 0 for numbers below ``2**-32``.
        shift: int64, at least -31.

    Example:
        >>> quantize_multiplier(torch.tensor(0.75, dtype=torch.float64))
        (tensor(1610612736), tensor(0))
    """
    mantissa, exponent = torch.frexp(real)
    exponent = exponent.to(torch.int64)
    multiplier = (mantissa * 2.0**bits + 0.5).floor().to(torch.int64)  # Exact: 53 bits suffice.
    carried = multiplier == 1 << bits
    multiplier = torch.where(carried, multiplier >> 1, multiplier)
    exponent = exponent + carried.to(torch.int64)
    lost = exponent < -_LARGEST_SHIFT
    return torch.where(lost, 0, multiplier), torch.where(lost, 0, exponent)


def _doubling_high_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the high half of twice the product of int32 numbers, rounded half away from zero.

    Reference: ``SaturatingRoundingDoublingHighMul`` of gemmlowp, for b >= 0.
    """
    product = a * b
    nudge = torch.where(product >= 0, 1 << 30, 1 - (1 << 30))
    return torch.div(product + nudge, 1 << 31, rounding_mode="trunc")


def shift_right(number: Tensor, bits: Tensor | int, rounding: str) -> Tensor:
    """Return ``number / 2**bits`` rounded to integers; fewer than 0 bits shift left.

    Args:
        number: int64, any shape.
        bits: int64 that broadcasts against it.
        rounding: one of :data:`torchq.formats.ROUNDINGS`.

    Example:
        >>> shift_right(torch.tensor([-12, -4, 4, 12]), 3, "half_up")
        tensor([-1,  0,  1,  2])
    """
    check_rounding(rounding)
    bits = torch.as_tensor(bits, dtype=torch.int64)
    # A shift by 63 bits or more is undefined; the result is the same from 62 on.
    right = bits.clamp(0, 62)
    floor = number >> right
    rest = number - (floor << right)
    half = torch.where(right > 0, 1 << (right - 1).clamp(min=0), 1)  # Without a shift rest is 0.
    above, tie = rest > half, rest == half
    up = {
        "down": torch.zeros_like(above),
        "up": rest > 0,
        "half_up": above | tie,
        "half_down": above,
        "half_even": above | (tie & (floor % 2 == 1)),
        "half_away": above | (tie & (number >= 0)),
        "half_toward_zero": above | (tie & (number < 0)),
    }[rounding]
    return torch.where(bits < 0, number << (-bits).clamp(0, 62), floor + up.to(torch.int64))
