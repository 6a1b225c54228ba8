"""Integer multipliers and shifts against the C of gemmlowp and TensorFlow Lite, in Python."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from tests.reference import rounded
from torchq.backends import (
    GEMMLOWP,
    SINGLE_ROUNDING,
    FixedPoint,
    quantize_multiplier,
    shift_right,
)
from torchq.errors import ConfigError
from torchq.formats import ROUNDINGS


def tflite_multiplier(real: float) -> tuple[int, int]:
    """``QuantizeMultiplier`` of tensorflow/lite/kernels/internal/quantization_util.cc."""
    if real == 0.0:
        return 0, 0
    mantissa, shift = math.frexp(real)
    fixed = math.floor(Fraction(mantissa) * 2**31 + Fraction(1, 2))  # std::round of a positive
    if fixed == 2**31:
        fixed, shift = fixed // 2, shift + 1
    return (0, 0) if shift < -31 else (fixed, shift)


def doubling_high_multiply(a: int, b: int) -> int:
    """``SaturatingRoundingDoublingHighMul`` of gemmlowp/fixedpoint/fixedpoint.h."""
    product = a * b
    nudge = (1 << 30) if product >= 0 else 1 - (1 << 30)
    total = product + nudge
    return total // 2**31 if total >= 0 else -(-total // 2**31)  # C divides towards zero.


def divide_by_power(x: int, exponent: int) -> int:
    """``RoundingDivideByPOT`` of gemmlowp/fixedpoint/fixedpoint.h."""
    mask = (1 << exponent) - 1
    remainder, threshold = x & mask, (mask >> 1) + (1 if x < 0 else 0)
    return (x >> exponent) + (1 if remainder > threshold else 0)


def tflite_multiply(x: int, real: float) -> int:
    """``MultiplyByQuantizedMultiplier`` with double rounding."""
    multiplier, shift = tflite_multiplier(real)
    left, right = max(shift, 0), max(-shift, 0)
    return divide_by_power(doubling_high_multiply(x * (1 << left), multiplier), right)


def sample(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    real = torch.rand(400, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-18, 3, (400,), generator=generator)
    real = real * 2.0**exponents
    real[:4] = torch.tensor([0.5, 0.25, 2.0**-31, 1 - 2.0**-40])
    accumulators = torch.randint(-(2**24), 2**24, (400,), generator=generator)
    accumulators[:6] = torch.tensor([0, 1, -1, 3, -3, -6])
    return accumulators, real


def test_multipliers(generator: torch.Generator) -> None:
    _, real = sample(generator)
    multiplier, shift = quantize_multiplier(real)
    assert list(zip(multiplier.tolist(), shift.tolist(), strict=True)) == [
        tflite_multiplier(value) for value in real.tolist()
    ]
    assert quantize_multiplier(torch.tensor(0.0, dtype=torch.float64))[0] == 0
    few, places = quantize_multiplier(real, bits=7)
    assert ((few >= 64) & (few <= 127)).all()
    nearest = few * 2.0 ** (places - 7)
    assert ((nearest - real).abs() <= real / 128).all()


def test_doubling_is_that_of_gemmlowp(generator: torch.Generator) -> None:
    accumulators, real = sample(generator)
    expected = [
        tflite_multiply(x, value)
        for x, value in zip(accumulators.tolist(), real.tolist(), strict=True)
    ]
    assert GEMMLOWP.multiply(accumulators, real).tolist() == expected


def test_single_rounding(generator: torch.Generator) -> None:
    accumulators, real = sample(generator)
    found = SINGLE_ROUNDING.multiply(accumulators, real).tolist()
    for x, value, result in zip(accumulators.tolist(), real.tolist(), found, strict=True):
        multiplier, shift = tflite_multiplier(value)
        exact = Fraction(x * multiplier, 2**31) * Fraction(2) ** shift
        assert result == math.floor(exact + Fraction(1, 2))
    # The two ways differ, or there would be no choice.
    assert found != GEMMLOWP.multiply(accumulators, real).tolist()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_shifts(rounding: str, generator: torch.Generator) -> None:
    numbers = torch.cat([torch.arange(-40, 41), torch.tensor([2**40 + 4, -(2**40) - 4, 2**61])])
    for bits in (0, 1, 3, 5):
        expected = [_shifted(int(n), bits, rounding) for n in numbers]
        assert shift_right(numbers, bits, rounding).tolist() == expected
    assert shift_right(torch.tensor([3]), -2, rounding).tolist() == [12]
    tiny = shift_right(torch.tensor([1, -1]), 63, rounding).tolist()
    assert tiny == [int(rounding == "up"), -int(rounding == "down")]


def _shifted(number: int, bits: int, rounding: str) -> int:
    """Round exactly; float64 holds these numbers."""
    exact = Fraction(number, 2**bits)
    if exact.denominator <= 2 or abs(exact) < 2**50:
        return rounded(float(exact), rounding)
    return number >> bits


def test_errors() -> None:
    with pytest.raises(ConfigError, match="got scheme 'triple'; expected 'doubling' or"):
        FixedPoint("triple")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got bits=32; expected 1 to 31"):
        FixedPoint("single", 32)
    with pytest.raises(ConfigError, match="for 'doubling'; expected 31 bits and 'half_away'"):
        FixedPoint("doubling", 15)
    with pytest.raises(ConfigError, match="rounding: got 'nearest'"):
        FixedPoint("single", 15, "nearest")
