"""The oracle: quantization of one number, in exact rational arithmetic, written from the definitions and not from torchq.

Everything is a Python ``float`` on the outside (every format here fits in binary64) and a ``Fraction`` on the inside. It is slow on
purpose: each operation is computed exactly and then rounded once to the float format that a tensor program would compute in.
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
    "fake_quantize",
    "float_fake_quantize",
    "integer_bounds",
    "nearest_value",
    "round_to",
    "tensor_quant",
]

TINY = 2.0**-24
"""An amax up to this (the smallest float16 subnormal, inclusive) means "the tensor is zero"."""


@dataclass(frozen=True)
class FloatSpec:
    """A binary float format with a sign bit.

    ``specials`` says what the codes of the highest exponent are: ``"ieee"`` infinity and NaNs (E5M2), ``"fn"`` finite numbers except
    the all-ones code, which is NaN (E4M3FN), ``"none"`` finite numbers only (FP4, FP6).
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"

    @property
    def num_codes(self) -> int:
        """Codes of both signs."""
        return 2 ** (1 + self.exponent_bits + self.mantissa_bits)

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share it."""
        return 1 - self.bias

    @property
    def max(self) -> Fraction:
        """The largest finite value."""
        top = 2**self.exponent_bits - 1
        mantissa = 2**self.mantissa_bits - 1
        if self.specials == "ieee":
            top -= 1
        elif self.specials == "fn":
            mantissa -= 1
        return (1 + Fraction(mantissa, 2**self.mantissa_bits)) * Fraction(2) ** (top - self.bias)

    def decode(self, code: int) -> float:
        """The value of ``code``: sign, exponent and mantissa from the highest bit down."""
        exponent, mantissa = divmod(code % (self.num_codes // 2), 2**self.mantissa_bits)
        sign = -1.0 if code >= self.num_codes // 2 else 1.0
        last_exponent = exponent == 2**self.exponent_bits - 1
        if last_exponent and self.specials == "ieee":
            return math.nan if mantissa else sign * math.inf
        if last_exponent and self.specials == "fn" and mantissa == 2**self.mantissa_bits - 1:
            return math.nan
        fraction = Fraction(mantissa, 2**self.mantissa_bits) + (exponent > 0)
        return sign * float(fraction * Fraction(2) ** (max(exponent, 1) - self.bias))

    def values(self) -> list[float]:
        """The value of every code, in code order; NaN, infinities and -0.0 included. For small formats only."""
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


def round_to(value: float | Fraction, spec: FloatSpec, *, saturate: bool = False) -> float:
    """Round to the nearest number of ``spec``, ties to the even mantissa; the sign of zero is kept.

    Args:
        value: any number; NaN stays NaN where the format has one (``ValueError`` where it has not).
        spec: the target.
        saturate: what happens beyond the largest finite number (and to infinity): True gives that number, False gives what the
            format has for overflow: infinity (``"ieee"``), NaN (``"fn"``), and the largest number where there is neither.
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
    """Nearest multiple of the local spacing, as if the exponent range had no upper end."""
    exponent = spec.smallest_exponent
    if value:
        floor_log2 = value.numerator.bit_length() - value.denominator.bit_length()
        floor_log2 -= value < Fraction(2) ** floor_log2
        exponent = max(exponent, floor_log2)
    spacing = Fraction(2) ** (exponent - spec.mantissa_bits)
    return round(value / spacing) * spacing  # round() of a Fraction is exact and half-to-even


def nearest_value(value: float, spec: FloatSpec) -> float:
    """The same as saturating :func:`round_to`, by searching all codes: the definition itself, to check the arithmetic against."""
    codes = [code for code in range(spec.num_codes // 2) if math.isfinite(spec.decode(code))]
    best = min(
        codes, key=lambda code: (abs(Fraction(spec.decode(code)) - abs(Fraction(value))), code % 2)
    )
    return math.copysign(spec.decode(best), value)


def integer_bounds(bits: int, unsigned: bool = False, narrow: bool = False) -> tuple[int, int]:
    """Lowest and highest code: (-128, 127), narrow (-127, 127), unsigned (0, 255) for 8 bits."""
    qmax = 2**bits - 1 if unsigned else 2 ** (bits - 1) - 1
    qmin = 0 if unsigned else -qmax if narrow else -qmax - 1
    return qmin, qmax


def fake_quantize(
    x: float,
    amax: float,
    bits: int = 8,
    unsigned: bool = False,
    narrow: bool = False,
    working: FloatSpec = FLOAT32,
) -> tuple[int, float]:
    """Step form: ``step = amax / qmax``, ``q = clamp(round(x / step))``, value ``q * step``; each operation rounded to ``working``.

    ``x`` (finite or infinite) and ``amax`` (finite, >= 0) must be numbers of ``working`` already. Returns the code and the value.
    """
    qmin, qmax = integer_bounds(bits, unsigned, narrow)
    if amax <= TINY:
        return 0, 0.0
    step = round_to(Fraction(amax) / qmax, working)
    if math.isinf(x):
        code = qmax if x > 0 else qmin
    else:
        code = _clamp(_half_even(round_to(Fraction(x) / Fraction(step), working)), qmin, qmax)
    return code, round_to(code * Fraction(step), working)


def tensor_quant(
    x: float,
    amax: float,
    bits: int = 8,
    unsigned: bool = False,
    narrow: bool = True,
    working: FloatSpec = FLOAT32,
) -> tuple[int, float, float]:
    """The ancestor's form: multiplier ``scale = qmax / amax``, ``q = clamp(round(x * scale))``, value ``q / scale``.

    Returns the code, the scale (1 for a tiny ``amax``) and the fake-quantized value, all rounded to ``working``.
    """
    qmin, qmax = integer_bounds(bits, unsigned, narrow)
    if amax <= TINY:
        return 0, 1.0, 0.0
    scale = round_to(qmax / Fraction(amax), working)
    code = _clamp(_half_even(round_to(Fraction(x) * Fraction(scale), working)), qmin, qmax)
    return code, scale, round_to(code / Fraction(scale), working)


def float_fake_quantize(
    x: float, amax: float, spec: FloatSpec, working: FloatSpec = FLOAT32
) -> float:
    """Scale so that ``amax`` lands on the largest number of ``spec``, round there with saturation, scale back.

    ``step = amax / spec.max``, ``value = round(x / step) * step``, each operation rounded to ``working``.
    """
    if amax <= TINY:
        return 0.0
    step = round_to(Fraction(amax) / spec.max, working)
    ratio = x if math.isinf(x) else round_to(Fraction(x) / Fraction(step), working)
    return round_to(Fraction(round_to(ratio, spec, saturate=True)) * Fraction(step), working)


def _half_even(value: float) -> float:
    """Round to an integer, ties to even; infinity stays."""
    return value if math.isinf(value) else float(round(Fraction(value)))


def _clamp(value: float, low: int, high: int) -> int:
    return int(min(max(value, low), high))
