"""amax <-> scale: one rounding, the rule for dead ranges, rounded block scales."""

import math
from fractions import Fraction

import pytest
import torch

from tests.reference import E4M3, FLOAT32, FLOAT64, round_to
from torchq import formats
from torchq.formats import CATALOG
from torchq.functional import scale_from_amax


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "int16", "e4m3", "e2m1"])
@pytest.mark.parametrize(
    ("dtype", "spec"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)], ids=str
)
def test_step_is_amax_over_qmax_rounded_once(
    name: str, dtype: torch.dtype, spec: object, generator: torch.Generator
) -> None:
    amax = torch.rand(300, generator=generator, dtype=dtype) * 10 + 1e-6
    exact = [
        round_to(Fraction(a) / int(CATALOG[name].qmax), spec) for a in amax.tolist()
    ]  # type: ignore[arg-type]
    scale = scale_from_amax(amax, CATALOG[name])
    assert scale.dtype is dtype
    assert scale.tolist() == exact
    torch.testing.assert_close(scale * CATALOG[name].qmax, amax)


def test_every_step_is_positive() -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-37, 1e-30, 1.0, 3e38])
    for scale_format in (None, formats.E8M0):
        scale = scale_from_amax(amax, formats.INT8, scale_format)
        assert bool((scale > 0).all())
        assert scale[:3].tolist() == [1.0, 1.0, 1.0]
    assert scale_from_amax(
        torch.tensor([math.inf, math.nan]), formats.INT8
    ).isfinite().tolist() == [False, False]
    assert scale_from_amax(
        torch.tensor([math.inf, math.nan]), formats.E4M3, formats.E8M0
    ).isfinite().tolist() == [False, False]


@pytest.mark.parametrize(
    ("name", "exponent"),
    [("e4m3", 8), ("e5m2", 15), ("e2m1", 2), ("e3m2", 4), ("e2m3", 2), ("int8", 6)],
)
def test_e8m0_steps(name: str, exponent: int) -> None:
    """The scale is ``2 ** (floor(log2(amax)) - emax)``.

    The exponents of the largest element of each format are in table 1 of the MX specification.
    """
    amax = torch.tensor([1.0, 1.99, 2.0, 448.0, 6.0, 0.001])
    expected = [
        2.0 ** (math.floor(math.log2(a)) - exponent)
        for a in (1.0, 1.99, 2.0, 448.0, 6.0, 0.001)
    ]
    assert scale_from_amax(amax, CATALOG[name], formats.E8M0).tolist() == expected


def test_e4m3_steps_have_one_scale_per_tensor() -> None:
    amax = torch.tensor([[6.0, 3.0], [0.0, 6e-7]])
    scale = scale_from_amax(amax, formats.E2M1, formats.E4M3)
    shared = round_to(1.0 / 448.0, FLOAT32)
    expected = [
        [
            round_to(round_to(s / shared, FLOAT32), E4M3, saturate=True) * shared
            for s in row
        ]
        for row in ((1.0, 0.5), (0.0, 1e-7))
    ]
    expected[1][0] = 1.0  # dead
    assert scale.tolist() == [
        [round_to(value, FLOAT32) for value in row] for row in expected
    ]
    assert scale_from_amax(torch.zeros(3), formats.E2M1, formats.E4M3).tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    assert scale_from_amax(torch.zeros(0, 2), formats.E2M1, formats.E4M3).shape == (
        0,
        2,
    )
