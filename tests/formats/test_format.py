"""Every format of the catalogue: the contract, and agreement with torch and ml_dtypes."""

import math
from typing import Any

import pytest
import torch

from tests.contracts import format_contract as contract
from tests.reference import round_to
from torchq import formats
from torchq.errors import ConfigError
from torchq.formats import (
    CATALOG,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    INT8,
    FloatFormat,
    Format,
    IntFormat,
    by_bits,
    format_by_name,
    integer_format,
    power_of_two_below,
)

EXHAUSTIVE = [name for name in CATALOG if CATALOG[name].bits <= 8]
WIDE = [name for name in CATALOG if CATALOG[name].bits > 8]


@pytest.fixture(params=EXHAUSTIVE)
def format(request: pytest.FixtureRequest) -> Format:
    """Every format of at most 8 bits."""
    return CATALOG[request.param]


def test_properties(format: Format) -> None:
    contract.check_properties(format)


def test_every_code_is_a_fixed_point(format: Format) -> None:
    contract.check_fixed_points(format)


def test_between_codes_ties_go_to_even(format: Format) -> None:
    contract.check_between(format)


def test_monotone_and_nearest(format: Format, generator: torch.Generator) -> None:
    contract.check_order(format, generator)


def test_limits(format: Format) -> None:
    contract.check_limits(format)


@pytest.mark.parametrize("name", WIDE)
def test_wide_integers(name: str) -> None:
    """Check rounding where the codes are few: float32 holds every half-way point of 16 bits."""
    contract.check_properties(CATALOG[name])
    contract.check_fixed_points(CATALOG[name])
    contract.check_between(CATALOG[name])
    contract.check_limits(CATALOG[name])


def every_float16() -> torch.Tensor:
    """Return all finite numbers of float16.

    Among them is every number and every half-way point of the formats up to 8 bits in its range.
    """
    x = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.float16)
        .float()
    )
    return x[x.isfinite()]


@pytest.mark.parametrize(
    ("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_fp8_is_torch_float8(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Compare on every float16 and on float32 noise, within the finite range.

    Beyond it torch gives NaN or infinity, and torchq saturates.
    """
    format = CATALOG[name]
    noise = torch.randn(20000, generator=generator) * torch.exp2(
        torch.randint(-20, 9, (20000,), generator=generator)
    )
    x = torch.cat([every_float16(), noise]).clamp(format.quant_min, format.quant_max)
    assert torch.equal(
        format.snap_(x.clone()),
        x.to(dtype).float(),
    )


@pytest.mark.parametrize(
    ("format", "name"),
    [
        (E2M1, "float4_e2m1fn"),
        (E2M3, "float6_e2m3fn"),
        (E3M2, "float6_e3m2fn"),
        (E4M3, "float8_e4m3fn"),
    ],
    ids=str,
)
def test_small_floats_are_those_of_ml_dtypes(format: Format, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = every_float16().clamp(format.quant_min, format.quant_max)
    peer = x.numpy().astype(getattr(ml_dtypes, name)).astype("float32")
    assert torch.equal(
        format.snap_(x.clone()),
        torch.from_numpy(peer),
    )


def test_e8m0_is_that_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = every_float16()
    x = x[x > 0]
    peer = torch.from_numpy(
        x.numpy().astype(ml_dtypes.float8_e8m0fnu).astype("float32")
    )
    ties = x / power_of_two_below(x) == 1.5
    assert torch.equal(
        E8M0.snap_(x.clone())[~ties],
        peer[~ties],
    )
    assert torch.equal(
        E8M0.snap_(x.clone())[ties],
        2 * power_of_two_below(x)[ties],
    )


def test_float64_is_rounded_once() -> None:
    """A float64 just above a half-way point is not rounded to float32 first, which would be it."""
    above = torch.tensor([1.0625 + 2.0**-40, 2.5 + 2.0**-40], dtype=torch.float64)
    assert E4M3.snap_(above[:1].clone()).item() == 1.125
    assert INT8.snap_(above[1:].clone()).item() == 3.0


def test_signed_zero_is_kept() -> None:
    for name, spec in contract.FLOAT_SPECS.items():
        snapped = CATALOG[name].snap_(torch.tensor([-0.0, -1e-9, 1e-9]))
        assert torch.signbit(snapped).tolist() == [True, True, False]
        assert math.copysign(1.0, round_to(-1e-9, spec)) == -1.0


def test_power_of_two_below() -> None:
    x = torch.tensor(
        [1.0, 1.5, 2.0, 3.999, -5.0, 2.0**-126, 0.0, 1e-45, math.inf, math.nan, 3.4e38]
    )
    expected = [
        1.0,
        1.0,
        2.0,
        2.0,
        4.0,
        2.0**-126,
        0.0,
        0.0,
        math.inf,
        math.inf,
        2.0**127,
    ]
    assert power_of_two_below(x).tolist() == expected
    assert power_of_two_below(x.double())[:7].tolist() == expected[:7]
    assert power_of_two_below(torch.tensor([[1.0, 9.0], [3.0, 5.0]]).t()).tolist() == [
        [1.0, 2.0],
        [8.0, 4.0],
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: integer_format(1),
            "format int1: got 1 bits; expected 2 to 16 for signed integers",
        ),
        (
            lambda: integer_format(17),
            "got 17 bits; expected 2 to 16 for signed integers",
        ),
        (
            lambda: integer_format(0, unsigned=True),
            "got 0 bits; expected 1 to 16 for unsigned integers",
        ),
        (
            lambda: format_by_name("int99"),
            "unknown format 'int99'; expected one of: .*'e4m3'.*'int8'",
        ),
        (lambda: by_bits((3, 4)), "unknown format 'e3m4'"),
        (
            lambda: by_bits((4, 3), unsigned=True),
            r"num_bits=\(4, 3\): got unsigned=True, narrow_range=False; expected neither",
        ),
        (
            lambda: by_bits((4, 3), narrow=True),
            r"narrow_range=True; expected neither for a floating-point format",
        ),
        (
            lambda: CATALOG.add("int8", INT8),
            "format 'int8' is registered already, as IntFormat.*; expected a new key",
        ),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


def test_formats_are_values() -> None:
    """Equal by content, hashable, and one object per name."""
    assert by_bits(8) == integer_format(8) == INT8
    assert hash(by_bits(8)) == hash(INT8)
    assert integer_format(8, unsigned=True, narrow=True) == format_by_name("uint8")
    assert integer_format(1, unsigned=True).values == (0.0, 1.0)
    assert integer_format(8) != integer_format(8, narrow=True)
    with pytest.raises(AttributeError):
        INT8.width = 4  # type: ignore[misc]


def test_a_new_float_format_needs_no_code() -> None:
    """E3M0 (a sign and powers of two) is in no catalogue: its grid follows from numbers alone."""
    e3m0 = FloatFormat("e3m0", True, 3, 0, bias=3)
    positive = [2.0**k for k in range(-2, 5)]
    assert e3m0.values == (*(-v for v in reversed(positive)), 0.0, *positive)
    assert e3m0.smallest_normal == 0.25
    assert e3m0.snap_(torch.tensor([3.1, -99.0, 0.1])).tolist() == [4.0, -16.0, 0.0]
    assert isinstance(E5M2, FloatFormat)
    assert not isinstance(E5M2, IntFormat)


@pytest.mark.parametrize("name", formats.SCALE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_types_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    """To the nearest number of the type, from the smallest scale on; larger ones stay."""
    kind = formats.SCALE_TYPES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator).mul(8).exp()
    edges = [kind.least, kind.least / 2, kind.qmax, kind.qmax * 1.0001, 3e38]
    x = torch.cat([x, torch.tensor(edges)]).to(dtype)
    near = x.clamp_min(kind.least).to(kind.dtype).to(dtype)
    assert torch.equal(
        kind.snap_(x.clone()),
        torch.where(x > kind.qmax, x, near),
    )
    odd = kind.snap_(torch.tensor([float("nan"), float("inf")], dtype=dtype))
    assert odd[0].isnan()
    assert odd[1].isinf()
    assert kind.qmax == torch.finfo(kind.dtype).max
    assert not kind.signed
    assert kind.smallest_normal == torch.finfo(kind.dtype).tiny <= kind.least


def test_the_table_of_powers_in_exports_is_the_rounding_of_scales() -> None:
    # Scales of blocks have several dimensions, the one of a tensor has none.
    for scales in (
        torch.tensor([[0.0, 1e-30, 0.7], [1.0, 3.0, 1e30]]),
        torch.tensor(0.7),
    ):
        expected = formats.POWER_OF_TWO.snap_(scales.clone())
        assert torch.equal(formats.format._power_from_table(scales), expected)
