"""fake_quantize, quantize and dequantize against the scalar oracle.

The cases are formats, granularities, dtypes, layouts and odd ranges.
"""

import math
from typing import Any

import pytest
import torch

from tests.contracts.quantize_contract import (
    expected,
    layouts,
    mx_expected,
    nvfp4_expected,
    same,
)
from tests.reference import E2M1, E2M3, E3M2, E4M3, E5M2, FloatSpec
from torchq import formats
from torchq.errors import ConfigError
from torchq.formats import (
    CATALOG,
    INT8,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
    integer_format,
)
from torchq.functional import (
    compute_dtype,
    dequantize,
    fake_quantize,
    learned_fake_quantize,
    quantize,
    reduce_amax,
)

FORMATS = [
    "int8",
    "int8_narrow",
    "uint8",
    "int4",
    "uint4",
    "int2",
    "int16",
    "e4m3",
    "e5m2",
    "e2m1",
    "e3m2",
    "e2m3",
]
GRANULARITIES = [
    *(PerTensor(), PerAxis((0,)), PerAxis((1,)), PerAxis((0, -1))),
    *(PerBlock(2, 1), PerBlock(4, 1), PerBlock(2)),
]
LAYOUTS = list(layouts(torch.zeros(1, 1, 1, 1)))


def sample(
    generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(3, 5, 2, 3), with values outside the range that :func:`clipped` gives and an exact zero."""
    x = torch.randn(3, 5, 2, 3, generator=generator)
    x[0, 0, 0, 0] = 0.0
    return x.to(dtype)


def clipped(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """A range in which the largest elements do not fit, in the dtype torchq computes in."""
    return reduce_amax(x, granularity) * 0.7


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_granularities(
    name: str, granularity: Granularity, generator: torch.Generator
) -> None:
    x = sample(generator)
    amax = clipped(x, granularity)
    assert same(
        fake_quantize(x, amax, CATALOG[name], granularity),
        expected(x, amax, CATALOG[name], granularity),
    )


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis((1,)), PerBlock(2, 1)], ids=str
)
@pytest.mark.parametrize("name", ["int8", "uint4", "e4m3"])
def test_dtypes(
    name: str, granularity: Granularity, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The result is computed in float32 and rounded once to the dtype of x.

    The dtype of amax does not matter; float64 is computed in float64.
    """
    x = sample(generator, dtype)
    amax = clipped(x, granularity)
    assert amax.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    y = fake_quantize(x, amax, CATALOG[name], granularity)
    assert same(y, expected(x, amax, CATALOG[name], granularity))
    assert same(learned_fake_quantize(x, amax, CATALOG[name], granularity), y)


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis((1,)), PerBlock(2, 1), PerBlock(5, 1)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(
    layout: str,
    granularity: Granularity,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """The strides are those that an elementwise function of torch would give.

    A ragged block is padded, and channels_last is kept.
    """
    x = layouts(sample(generator, dtype))[layout]
    amax = clipped(x, granularity)
    y = fake_quantize(x, amax, INT8, granularity)
    assert same(y, fake_quantize(x.contiguous(), amax, INT8, granularity))
    ragged = isinstance(granularity, PerBlock) and x.shape[1] % granularity.size != 0
    if not ragged or layout in ("contiguous", "channels_last"):
        assert y.stride() == x.abs().stride()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0, 4), (1,), (5,)])
def test_small_and_empty_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.full(shape, 0.3, dtype=dtype, requires_grad=True)
    y = fake_quantize(x, 1.0)
    assert same(
        y.detach(),
        expected(x.detach(), torch.tensor(1.0), INT8, PerTensor()),
    )
    y.sum().backward()
    assert x.grad is not None
    assert same(x.grad, torch.ones(shape, dtype=dtype))
    for granularity in (PerAxis((0,)), PerBlock(4)) if shape else ():
        amax = reduce_amax(x, granularity)
        assert fake_quantize(x, amax, INT8, granularity).shape == shape
        assert (
            fake_quantize(x, amax, formats.E2M1, granularity, formats.E8M0).dtype
            is dtype
        )


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_and_dequantize(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Codes are grid values in the compute dtype.

    Dequantizing them is the fake-quantized tensor before its last rounding.
    """
    x = sample(generator, dtype)
    format = CATALOG[name]
    granularity = PerAxis((1,))
    amax = clipped(x, granularity)
    codes = quantize(x, amax, format, granularity)
    assert codes.dtype is amax.dtype
    assert codes.shape == x.shape
    if format.bits <= 8:
        assert set(codes.flatten().tolist()) <= set(format.values)
    assert same(
        dequantize(codes, amax, format, granularity).to(dtype),
        fake_quantize(x, amax, format, granularity),
    )
    assert not quantize(x.requires_grad_(), amax, format, granularity).requires_grad


@pytest.mark.parametrize(
    "spec", [E4M3, E5M2, E3M2, E2M3, E2M1], ids=["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
)
@pytest.mark.parametrize("size", [32, 20])
def test_mx_blocks(spec: FloatSpec, size: int, generator: torch.Generator) -> None:
    name = f"e{spec.exponent_bits}m{spec.mantissa_bits}"
    x = (
        torch.randn(6, 70, generator=generator)
        * torch.exp2(torch.arange(-20.0, 40.0, 10.0))[:, None]
    )
    x[2, :32] = 0.0
    granularity = PerBlock(size)
    y = fake_quantize(
        x, reduce_amax(x, granularity), CATALOG[name], granularity, formats.E8M0
    )
    assert same(y, mx_expected(x, spec, size))


def test_nvfp4(generator: torch.Generator) -> None:
    """Also a dead block, and one so far below the others that its E4M3 scale rounds to zero."""
    x = torch.randn(5, 50, generator=generator)
    x[1, :16] = 0.0
    x[2, 16:32] = 1e-5
    x[3] *= 100.0
    granularity = PerBlock(16)
    y = fake_quantize(
        x, reduce_amax(x, granularity), formats.E2M1, granularity, formats.E4M3
    )
    assert same(y, nvfp4_expected(x))
    assert bool((y[2, 16:32] == 0).all())


@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3"])
def test_dead_ranges_are_exactly_zero(name: str, dtype: torch.dtype) -> None:
    """Where the scale is below the smallest normal number; the smallest normal scale is alive."""
    x = torch.tensor([-1.0, -0.0, 3e-8, 5.0], dtype=dtype)
    computed = compute_dtype(dtype)
    alive = CATALOG[name].qmax * torch.finfo(computed).tiny
    dead = torch.tensor(alive, dtype=computed).nextafter(
        torch.tensor(0.0, dtype=computed)
    )
    for amax in (0.0, 2.0**-149 if computed is torch.float32 else 5e-324, dead):
        assert fake_quantize(x, amax, CATALOG[name]).abs().tolist() == [0.0] * 4
        assert quantize(x, amax, CATALOG[name]).abs().tolist() == [0.0] * 4
    assert quantize(x, alive, CATALOG[name])[3].item() == CATALOG[name].qmax


@pytest.mark.parametrize("amax", [1e-8, 5e-8, 2.0**-24, 1e-20, 1e-30, 3e-35])
@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3"])
def test_small_ranges_keep_their_precision(name: str, amax: float) -> None:
    """Scaling a tensor by a power of two scales its result, however small the numbers are."""
    x = torch.linspace(0, 1, 50)
    shift = 2.0 ** math.floor(math.log2(amax))
    small = fake_quantize(x * shift, shift, CATALOG[name])
    assert torch.equal(small, fake_quantize(x, 1.0, CATALOG[name]) * shift)
    assert int((small != 0).sum()) > 40


def test_poisoned_values_are_seen() -> None:
    x = torch.tensor([1.0, -2.0, 0.0])
    for amax in (math.inf, math.nan):
        assert fake_quantize(x, amax).isnan().all()
        assert fake_quantize(
            x, torch.tensor([amax, 1.0, 1.0]), INT8, PerAxis((0,))
        ).isnan().tolist() == [True, False, False]
    odd = torch.tensor([math.nan, math.inf, -math.inf])
    for name in FORMATS:
        lo, hi = (
            bound / CATALOG[name].qmax
            for bound in (CATALOG[name].quant_min, CATALOG[name].quant_max)
        )
        assert torch.equal(
            fake_quantize(odd, 1.0, CATALOG[name])[1:], torch.tensor([hi, lo])
        )
        assert fake_quantize(odd, 1.0, CATALOG[name])[0].isnan()
    assert fake_quantize(odd, 0.0).isnan().all()


def test_unsigned_clamps_negative_values() -> None:
    x = torch.tensor([-3.0, -1e-8, 0.4])
    assert fake_quantize(x, 1.0, integer_format(1, unsigned=True)).tolist() == [
        0.0,
        0.0,
        0.0,
    ]
    assert fake_quantize(x, 1.0, formats.UINT8).tolist() == [
        0.0,
        0.0,
        pytest.approx(0.4),
    ]


INT = torch.ones(2, dtype=torch.int64)
FLAGS = torch.ones(2, dtype=torch.bool)
ONES = torch.ones(2)
ERRORS: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    (
        fake_quantize,
        (INT, 1.0),
        TypeError,
        "fake_quantize: got a tensor of torch.int64; expected",
    ),
    (
        quantize,
        (FLAGS, 1.0),
        TypeError,
        r"quantize: got a tensor of torch.bool; .*x.float\(\)",
    ),
    (
        learned_fake_quantize,
        (INT, ONES),
        TypeError,
        "learned_fake_quantize: got a tensor",
    ),
    (dequantize, (INT, 1.0), TypeError, "dequantize: got a tensor of torch.int64"),
    (
        fake_quantize,
        (ONES, ONES),
        ConfigError,
        r"amax has shape \(2,\); expected one value, per t",
    ),
    (
        fake_quantize,
        (torch.ones(2, 3), torch.ones(3), INT8, PerAxis((0,))),
        ConfigError,
        r"expected \(2, 1\) for axis \(0,\)",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "error", "text"), ERRORS)
def test_errors(
    function: Any, arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        function(*arguments)
