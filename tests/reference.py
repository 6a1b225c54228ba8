"""The oracle: quantization of one number in exact rational arithmetic.

It is written from the definitions and shares no code with torchq. Arguments and results are
Python ``float`` (every format here fits binary64); the arithmetic uses ``Fraction``. Each
operation is computed exactly and then rounded once to the float format that a tensor program
would compute in, so the oracle is slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

__all__ = [
    "BFLOAT16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "FloatSpec",
    "affine_fake_quantize",
    "fake_quantize",
    "float_fake_quantize",
    "integer_bounds",
    "power_of_two_above",
    "round_to",
    "rounded",
    "tensor_quant",
]

LEGACY_TINY = 2.0**-24
"""The original reads an amax up to this (the smallest float16 subnormal) as "all zero"."""


@dataclass(frozen=True)
class FloatSpec:
    """A binary float format with a sign bit.

    ``specials`` names the codes of the highest exponent: ``"ieee"`` for infinity and NaNs (E5M2),
    ``"fn"`` for finite numbers except the all-ones code, which is NaN (E4M3FN), ``"none"`` for
    finite numbers only (FP4, FP6).
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"

    @property
    def num_codes(self) -> int:
        """The number of codes of both signs."""
        return 2 ** (1 + self.exponent_bits + self.mantissa_bits)

    @property
    def smallest_exponent(self) -> int:
        """The exponent of the smallest normal number and of all subnormals."""
        return 1 - self.bias

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive number with the full precision."""
        return Fraction(2) ** self.smallest_exponent

    @property
    def max(self) -> Fraction:
        """The largest finite value."""
        top = 2**self.exponent_bits - 1
        mantissa = 2**self.mantissa_bits - 1
        if self.specials == "ieee":
            top -= 1
        elif self.specials == "fn":
            mantissa -= 1
        return (1 + Fraction(mantissa, 2**self.mantissa_bits)) * Fraction(2) ** (
            top - self.bias
        )

    def decode(self, code: int) -> float:
        """The value of ``code``: sign, exponent and mantissa from the highest bit down."""
        exponent, mantissa = divmod(
            code % (self.num_codes // 2),
            2**self.mantissa_bits,
        )
        sign = -1.0 if code >= self.num_codes // 2 else 1.0
        last_exponent = exponent == 2**self.exponent_bits - 1
        if last_exponent and self.specials == "ieee":
            return math.nan if mantissa else sign * math.inf
        if (
            last_exponent
            and self.specials == "fn"
            and mantissa == 2**self.mantissa_bits - 1
        ):
            return math.nan
        fraction = Fraction(mantissa, 2**self.mantissa_bits) + (exponent > 0)
        return sign * float(fraction * Fraction(2) ** (max(exponent, 1) - self.bias))

    def values(self) -> list[float]:
        """Return the value of every code of a small format, with NaN, infinities and -0.0."""
        return [self.decode(code) for code in range(self.num_codes)]


FLOAT64 = FloatSpec(11, 52, 1023)
FLOAT32 = FloatSpec(8, 23, 127)
FLOAT16 = FloatSpec(5, 10, 15)
BFLOAT16 = FloatSpec(8, 7, 127)
E5M2 = FloatSpec(5, 2, 15)
E4M3 = FloatSpec(4, 3, 7, "fn")
E3M2 = FloatSpec(3, 2, 3, "none")
E2M3 = FloatSpec(2, 3, 1, "none")
E2M1 = FloatSpec(2, 1, 1, "none")


def round_to(
    value: float | Fraction, spec: FloatSpec, *, saturate: bool = False
) -> float:
    """Round to the nearest number of ``spec``, ties to the even mantissa; the sign of zero is kept.

    Args:
        value: any number; NaN stays NaN if the format has one.
        spec: the format of the result.
        saturate: True gives the largest finite number for every larger value and for infinity.
            False gives the overflow of the format: infinity (``"ieee"``), NaN (``"fn"``), or the
            largest number if there is neither.

    Raises:
        ValueError: NaN for a format without one.
    """
    if isinstance(value, float) and math.isnan(value):
        if spec.specials == "none":
            raise ValueError("the format has no NaN")
        return value
    sign = math.copysign(1.0, value)
    if not (isinstance(value, float) and math.isinf(value)):
        magnitude = _round_magnitude(abs(Fraction(value)), spec)
        if magnitude <= spec.max:
            return sign * float(magnitude)
    if saturate or spec.specials == "none":
        return sign * float(spec.max)
    return sign * math.inf if spec.specials == "ieee" else math.nan


def _round_magnitude(value: Fraction, spec: FloatSpec) -> Fraction:
    """Return the nearest multiple of the local spacing; the exponent has no upper limit."""
    exponent = spec.smallest_exponent
    if value:
        floor_log2 = value.numerator.bit_length() - value.denominator.bit_length()
        floor_log2 -= value < Fraction(2) ** floor_log2
        exponent = max(exponent, floor_log2)
    spacing = Fraction(2) ** (exponent - spec.mantissa_bits)
    # Round() of a Fraction is exact and half-to-even.
    return round(value / spacing) * spacing


def integer_bounds(
    bits: int, unsigned: bool = False, narrow: bool = False
) -> tuple[int, int]:
    """Return the lowest and highest code.

    For 8 bits these are (-128, 127), narrow (-127, 127), unsigned (0, 255).
    """
    if unsigned:
        return 0, 2**bits - 1
    quant_max = 2 ** (bits - 1) - 1
    return (-quant_max if narrow else -quant_max - 1), quant_max


def fake_quantize(
    x: float,
    amax: float,
    bits: int = 8,
    unsigned: bool = False,
    narrow: bool = False,
    working: FloatSpec = FLOAT32,
    power_of_two: bool = False,
    rounding: str = "half_even",
) -> tuple[int, float]:
    """Return the code ``clamp(round(x / scale))`` and the value ``code * scale``.

    The scale is ``amax / quant_max``, rounded up if ``power_of_two``; everything is 0 where it is
    no normal number of ``working``.
    Each operation is rounded to ``working``, which ``x`` (finite
    or infinite) and ``amax`` (finite, >= 0) must be numbers of.
    """
    quant_min, quant_max = integer_bounds(bits, unsigned, narrow)
    scale = round_to(Fraction(amax) / quant_max, working)
    if scale < working.smallest_normal:
        return 0, 0.0
    scale = power_of_two_above(scale) if power_of_two else scale
    if math.isinf(x):
        code = quant_max if x > 0 else quant_min
    else:
        ratio = round_to(Fraction(x) / Fraction(scale), working)
        code = ratio if math.isinf(ratio) else rounded(ratio, rounding)
        code = _clamp(code, quant_min, quant_max)
    return code, round_to(code * Fraction(scale), working)


def tensor_quant(
    x: float,
    amax: float,
    bits: int = 8,
    unsigned: bool = False,
    narrow: bool = True,
    working: FloatSpec = FLOAT32,
) -> tuple[int, float, float]:
    """Return the code, the legacy scale (1 for a tiny ``amax``) and the value.

    These are ``clamp(round(x * scale))``, ``quant_max / amax`` and ``code / scale``, each operation
    rounded to ``working``.
    """
    quant_min, quant_max = integer_bounds(bits, unsigned, narrow)
    if amax <= LEGACY_TINY:
        return 0, 1.0, 0.0
    scale = round_to(quant_max / Fraction(amax), working)
    product = round_to(Fraction(x) * Fraction(scale), working)
    code = _clamp(_half_even(product), quant_min, quant_max)
    return code, scale, round_to(code / Fraction(scale), working)


def float_fake_quantize(
    x: float, amax: float, spec: FloatSpec, working: FloatSpec = FLOAT32
) -> float:
    """Return ``round(x / scale) * scale``, where the rounding is to ``spec`` and saturates.

    The scale is ``amax / spec.max``; everything is 0 where it is no normal number of ``working``.
    Each operation is rounded to ``working``.
    """
    scale = round_to(Fraction(amax) / spec.max, working)
    if scale < working.smallest_normal:
        return 0.0
    ratio = x if math.isinf(x) else round_to(Fraction(x) / Fraction(scale), working)
    return round_to(
        Fraction(round_to(ratio, spec, saturate=True)) * Fraction(scale), working
    )


def affine_fake_quantize(
    x: float,
    amin: float,
    amax: float,
    bits: int = 8,
    unsigned: bool = True,
    power_of_two: bool = False,
    rounding: str = "half_even",
    working: FloatSpec = FLOAT32,
) -> tuple[int, int, float]:
    """Return the code, the zero point and the value for the range [amin, amax].

    The code is ``clamp(round(x / scale) + zero_point)`` with ``scale = (amax - amin) / (highest -
    lowest code)`` and ``zero_point = round(lowest code - amin / scale)``, ties to even. The value
    is ``(code - zero_point) * scale``. Each operation is rounded to ``working``.
    """
    quant_min, quant_max = integer_bounds(bits, unsigned)
    low = min(Fraction(amin), Fraction(0))
    high = max(Fraction(amax), Fraction(0))
    length = round_to(high - low, working)
    scale = round_to(Fraction(length) / (quant_max - quant_min), working)
    if power_of_two and scale >= working.smallest_normal:
        scale = power_of_two_above(scale)
    is_dead = scale < working.smallest_normal
    scale = 1.0 if is_dead else scale
    ratio = round_to(low / Fraction(scale), working)
    zero_point = round(Fraction(round_to(quant_min - Fraction(ratio), working)))
    if is_dead:
        return zero_point, zero_point, 0.0
    if math.isinf(x):
        code = quant_max if x > 0 else quant_min
    else:
        ratio = round_to(Fraction(x) / Fraction(scale), working)
        shifted = (
            rounded(ratio, rounding) + zero_point if math.isfinite(ratio) else ratio
        )
        code = _clamp(shifted, quant_min, quant_max)
    return code, zero_point, round_to((code - zero_point) * Fraction(scale), working)


def power_of_two_above(value: float) -> float:
    """Return the smallest power of two that is at least ``value``, which is > 0."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def rounded(value: float, rounding: str) -> int:
    """Round a finite number to an integer by the definition of each policy."""
    exact = Fraction(value)
    low = math.floor(exact)
    high = math.ceil(exact)
    if rounding in ("up", "down"):
        return high if rounding == "up" else low
    if exact - low != Fraction(1, 2):
        return low if exact - low < Fraction(1, 2) else high
    return {
        "half_even": low if low % 2 == 0 else high,
        "half_up": high,
        "half_down": low,
        "half_toward_zero": low if exact > 0 else high,
        "half_away": high if exact > 0 else low,
    }[rounding]


def _half_even(value: float) -> float:
    """Round to an integer, ties to even; leave infinity as it is."""
    return value if math.isinf(value) else float(round(Fraction(value)))


def _clamp(value: float, low: int, high: int) -> int:
    return int(min(max(value, low), high))
