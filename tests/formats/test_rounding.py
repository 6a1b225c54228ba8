"""Rounding policies: tensor and scalar against the definition, where the usual formulas fail."""

import dataclasses

import pytest
import torch

from tests.reference import power_of_two_above, rounded
from torchq.errors import ConfigError
from torchq.formats import (
    E4M3,
    INT8,
    POWER_OF_TWO,
    ROUNDINGS,
    by_bits,
    integer_format,
    round_,
    round_number,
)

# Ties of both signs, the neighbours of a tie, and the odd numbers that adding 0.5 makes even.
_NUMBERS = [
    *(n + 0.5 for n in range(-4, 4)),
    *(n / 8 for n in range(-24, 25)),
    *(
        0.49999997,
        -0.49999997,
        0.50000006,
        -0.50000006,
        1.4999999,
        2.5000002,
        -2.5000002,
    ),
    *(
        8388609.0,
        -8388609.0,
        8388607.5,
        -8388607.5,
        4194304.5,
        1e-30,
        -1e-30,
        16777215.0,
        3e38,
    ),
]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_and_number_agree_with_the_definition(
    rounding: str, dtype: torch.dtype
) -> None:
    x = torch.tensor(_NUMBERS, dtype=dtype)
    numbers = x.tolist()
    expected = [rounded(number, rounding) for number in numbers]
    result = round_(x, rounding)
    assert result.data_ptr() == x.data_ptr()
    assert result.tolist() == [float(number) for number in expected]
    assert [round_number(number, rounding) for number in numbers] == expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_what_is_no_number_stays(rounding: str) -> None:
    x = round_(torch.tensor([torch.nan, torch.inf, -torch.inf]), rounding)
    assert x[0].isnan()
    assert x[1:].tolist() == [torch.inf, -torch.inf]


def test_table_of_ties() -> None:
    ties = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
    table = {
        policy: [round_number(tie, policy) for tie in ties] for policy in ROUNDINGS
    }
    assert table == {
        "half_even": [-2, -2, 0, 0, 2, 2],
        "half_up": [-2, -1, 0, 1, 2, 3],
        "half_down": [-3, -2, -1, 0, 1, 2],
        "half_toward_zero": [-2, -1, 0, 0, 1, 2],
        "half_away": [-3, -2, -1, 1, 2, 3],
        "up": [-2, -1, 0, 1, 2, 3],
        "down": [-3, -2, -1, 0, 1, 2],
    }


def test_formats_carry_the_policy() -> None:
    away = integer_format(4, rounding="half_away")
    assert away.snap_(torch.tensor([0.5, -0.5, 6.5, 99.0])).tolist() == [1, -1, 7, 7]
    assert away != integer_format(4)
    assert away.name == "int4"
    assert by_bits(8, rounding="half_even") == INT8
    # Between 16 and 18, the grid values of E4M3 there, lies one tie.
    up = dataclasses.replace(E4M3, rounding="half_up")
    assert up.snap_(torch.tensor([17.0, -17.0])).tolist() == [18.0, -16.0]
    assert E4M3.snap_(torch.tensor([17.0, -17.0])).tolist() == [16.0, -16.0]


def test_unknown_policies_are_named() -> None:
    with pytest.raises(
        ConfigError, match="rounding: got 'nearest'; expected one of half_even, "
    ):
        integer_format(8, rounding="nearest")
    with pytest.raises(ConfigError, match="rounding: got 'bankers'; expected one of"):
        round_number(0.5, "bankers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_are_rounded_up_to_powers_of_two(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    exponent = torch.randint(-120, 120, (500,), generator=generator, dtype=dtype)
    x = torch.rand(500, generator=generator, dtype=dtype).add_(0.5) * 2.0**exponent
    x[:5] = torch.tensor([1.0, 0.5, 0.75, 1.0000001, 2.0**-126])
    expected = [power_of_two_above(number) for number in x.tolist()]
    assert POWER_OF_TWO.snap_(x).tolist() == expected


def test_no_power_of_two_is_infinite() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max, torch.inf, 0.0, 1e-42])
    assert POWER_OF_TWO.snap_(largest).tolist() == [2.0**127, torch.inf, 0.0, 0.0]
    assert POWER_OF_TWO.snap_(torch.tensor([torch.nan])).isnan().all()
