"""The oracle against hand-computed examples, other libraries and its own second definition."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch

from tests.reference import (
    BFLOAT16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FLOAT16,
    FLOAT32,
    FloatSpec,
    fake_quantize,
    float_fake_quantize,
    integer_bounds,
    nearest_value,
    round_to,
    tensor_quant,
)

SMALL = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}
TORCH_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def float32(value: float) -> float:
    """Nearest binary32, by the C library."""
    return struct.unpack("f", struct.pack("f", value))[0]


def same(a: float, b: float) -> bool:
    """Equal, with NaN equal to NaN and -0.0 different from 0.0."""
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    )


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("e4m3", "float8_e4m3fn"),
        ("e5m2", "float8_e5m2"),
        ("e3m2", "float6_e3m2fn"),
        ("e2m3", "float6_e2m3fn"),
        ("e2m1", "float4_e2m1fn"),
    ],
)
def test_codes_decode_like_ml_dtypes(name: str, attribute: str) -> None:
    numpy = pytest.importorskip("numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    spec = SMALL[name]
    codes = numpy.arange(spec.num_codes, dtype=numpy.uint8)
    theirs = codes.view(getattr(ml_dtypes, attribute)).astype(numpy.float64).tolist()
    assert all(same(a, b) for a, b in zip(spec.values(), theirs, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_rounding_agrees_with_a_search_over_all_codes(name: str) -> None:
    spec = SMALL[name]
    grid = sorted({value for value in spec.values() if math.isfinite(value)})
    middles = [(a + b) / 2 for a, b in pairwise(grid)]
    beside = [math.nextafter(value, side) for value in middles for side in (-math.inf, math.inf)]
    for value in [*grid, *middles, *beside, 2 * grid[-1], -2 * grid[-1], 1e-30, -0.0]:
        assert same(round_to(value, spec, saturate=True), nearest_value(value, spec)), value


@pytest.mark.parametrize(
    ("name", "value", "overflow", "saturated"),
    [
        # Halfway to the 480 that is NaN: the tie goes to the even 448.
        ("e4m3", 464.0, 448.0, 448.0),
        ("e4m3", 465.0, math.nan, 448.0),
        ("e4m3", math.inf, math.nan, 448.0),
        ("e5m2", 61439.0, 57344.0, 57344.0),
        # A tie again, but here the even neighbour is infinity.
        ("e5m2", 61440.0, math.inf, 57344.0),
        ("e5m2", -math.inf, -math.inf, -57344.0),
    ],
)
def test_overflow(name: str, value: float, overflow: float, saturated: float) -> None:
    assert same(round_to(value, SMALL[name]), overflow)
    assert same(round_to(value, SMALL[name], saturate=True), saturated)
    # OFP8 allows both modes. torch's own E4M3FN cast moved from the first to the second.
    theirs = torch.tensor(value).to(TORCH_FLOAT8[name]).double().item()
    assert same(theirs, overflow) or same(theirs, saturated)


@pytest.mark.parametrize(
    ("spec", "torch_dtype"),
    [(FLOAT32, torch.float32), (FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16)],
)
def test_rounding_agrees_with_hardware_casts(
    spec: FloatSpec, torch_dtype: torch.dtype, generator: torch.Generator
) -> None:
    normal = torch.randn(300, generator=generator, dtype=torch.float64)
    scales = torch.tensor([1e-42, 1e-38, 1e-7, 6e-5, 1.0, 6e4, 1e38], dtype=torch.float64)
    values = (normal * scales[:, None]).flatten()
    if torch_dtype is not torch.float32:
        values = (
            values.float().double()
        )  # torch casts float64 to 16 bits through float32: start there, so one rounding is left
    theirs = values.to(torch_dtype).double().tolist()
    assert all(
        same(round_to(value, spec), other)
        for value, other in zip(values.tolist(), theirs, strict=True)
    )


def test_first_worked_example_of_tensor_quant() -> None:
    x = torch.rand(10, generator=torch.Generator().manual_seed(12345))
    results = [tensor_quant(value, x.max().item()) for value in x.tolist()]
    assert [code for code, _, _ in results] == [126, 113, 127, 59, 11, 23, 47, 73, 43, 27]
    assert {scale for _, scale, _ in results} == {float32(127 / x.max().item())}
    expected = [0.9843313694, 0.8827733397, 0.9921435118, 0.4609170556, 0.0859336928]
    expected += [0.1796795279, 0.3671712279, 0.5702872276, 0.3359225988, 0.2109281421]
    assert [value for _, _, value in results] == [
        float32(value) for value in expected
    ]  # ten digits identify a binary32


@pytest.mark.parametrize(
    ("x", "amax", "options", "codes"),
    [
        ([-1, -0.5, 0, 0.26, 0.75, 1.2], 1, (4, False, True), [-7, -4, 0, 2, 5, 7]),
        ([0, 0.1, 0.5, 1.1], 1, (4, True, True), [0, 2, 8, 15]),
        ([-1.01, -1, 1], 1, (8, False, False), [-128, -127, 127]),
        ([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 127, (8, False, True), [0, 2, 2, 0, -2, -2]),
        ([1, 2, -5], 0, (8, False, True), [0, 0, 0]),
        ([1, 2, -5], 2.0**-24, (8, False, True), [0, 0, 0]),
    ],
)
def test_hand_checked_vectors(
    x: list[float], amax: float, options: tuple[int, bool, bool], codes: list[int]
) -> None:
    """The legacy form multiplies by qmax / amax; at an exact middle that may be another code."""
    bits, unsigned, narrow = options
    qmax = integer_bounds(bits, unsigned)[1]
    inputs = [float32(value) for value in x]
    assert [tensor_quant(value, amax, bits, unsigned, narrow)[0] for value in inputs] == codes
    if 0 < amax <= 2.0**-24:
        return  # torchq's own rule for dead ranges is another one; see the next test.
    for value, code in zip(inputs, codes, strict=True):
        own, result = fake_quantize(value, amax, bits, unsigned, narrow)
        middle = amax > 0 and abs(value / amax * qmax) % 1 == 0.5
        assert abs(own - code) <= middle
        # Two roundings to binary32 (of the scale and of the result), each at most 2^-24 relative.
        assert result == pytest.approx(own * amax / qmax, rel=2.0**-22)


def test_ranges_are_dead_below_the_smallest_normal_scale() -> None:
    """Torchq's rule: amax / qmax must be a normal number; 2**-126 is the smallest of binary32."""
    smallest = 127 * 2.0**-126
    assert fake_quantize(1.0, smallest) == (127, smallest)
    assert fake_quantize(1.0, smallest * (1 - 2.0**-23)) == (0, 0.0)
    assert fake_quantize(1e-8, 1e-8)[0] == 127
    assert float_fake_quantize(1.0, 448 * 2.0**-126, E4M3) == 448 * 2.0**-126
    assert float_fake_quantize(1.0, 447 * 2.0**-126, E4M3) == 0.0


def test_the_two_forms_differ_at_a_middle() -> None:
    """0.5 / (1 / 15) is 7.5, but the binary32 nearest to 1 / 15 is larger; 0.5 * 15 is exact."""
    assert fake_quantize(0.5, 1.0, bits=4, unsigned=True)[0] == 7
    assert tensor_quant(0.5, 1.0, bits=4, unsigned=True)[0] == 8


def test_fp8_vector_of_the_ancestor() -> None:
    inputs = [float32(-2 + 0.2 * index) for index in range(10)]
    expected = [-2, -1.8571, -1.5714, -1.4286, -1.1429, -1, -0.7857, -0.5714, -0.3929, -0.1964]
    assert [float_fake_quantize(x, 2.0, E4M3) for x in inputs] == pytest.approx(
        expected, abs=5e-5
    )  # four digits are printed
    unscaled = [-2, -1.75, -1.625, -1.375, -1.25, -1, -0.8125, -0.625, -0.40625, -0.203125]
    assert [round_to(x, E4M3, saturate=True) for x in inputs] == unscaled
