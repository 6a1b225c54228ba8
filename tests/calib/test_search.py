"""The search on the tensor itself, against trying every candidate one element at a time."""

import pytest
import torch

from tests.reference import FLOAT64
from tests.reference import fake_quantize as scalar_fake_quantize
from torchq import QuantDescriptor
from torchq.calib import search_range
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    UINT4,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
    integer_format,
)
from torchq.functional import fake_quantize
from torchq.nn import TensorQuantizer


def squared_error(values: list[float], amax: float, bits: int) -> float:
    return sum(
        (scalar_fake_quantize(v, amax, bits, working=FLOAT64)[1] - v) ** 2
        for v in values
    )


@pytest.mark.parametrize("bits", [3, 4])
def test_no_candidate_is_better_by_the_scalar_oracle(
    bits: int, generator: torch.Generator
) -> None:
    x = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    actual = search_range(x, integer_format(bits), PerAxis((0,)), candidates=21).high
    assert (actual < PerAxis((0,)).amax(x)).any()
    for row, amax in zip(x.tolist(), actual.flatten().tolist(), strict=True):
        least = min(
            squared_error(row, max(map(abs, row)) * (1 - 0.8 * i / 20), bits)
            for i in range(21)
        )
        # The candidates are computed alike up to float64 rounding, and so are the errors.
        assert squared_error(row, amax, bits) <= least * (1 + 1e-12)


CASES: list[tuple[Format, Granularity, Format | None]] = [
    (INT8, PerTensor(), None),
    (INT4, PerAxis((0,)), None),
    (INT4, PerAxis((1,)), None),
    (UINT4, PerAxis((0, 1)), None),
    (INT4, PerBlock(8, 1), None),
    (INT4, PerBlock(5, -1), None),
    (E4M3, PerTensor(), None),
    (E2M1, PerBlock(16, 1), E4M3),
]


@pytest.mark.parametrize(("format", "granularity", "scale_format"), CASES)
def test_never_worse_than_the_maximum(
    format: Format,
    granularity: Granularity,
    scale_format: Format | None,
    generator: torch.Generator,
) -> None:
    x = torch.randn(12, 32, generator=generator)
    amax = search_range(x, format, granularity, scale_format=scale_format).high
    assert amax.shape == granularity.amax_shape(x.shape)
    assert (amax <= granularity.amax(x)).all()

    def error(amax: torch.Tensor) -> float:
        return (
            (fake_quantize(x, amax, format, granularity, scale_format) - x)
            .square()
            .sum()
            .item()
        )

    assert error(amax) <= error(granularity.amax(x))


@pytest.mark.parametrize("granularity", [PerAxis((0,)), PerBlock(32, 1)])
def test_pieces_do_not_show(
    granularity: Granularity, generator: torch.Generator
) -> None:
    x = torch.randn(70, 2048, generator=generator)
    rows = [
        search_range(row.unsqueeze(0), INT4, granularity, candidates=5).high
        for row in x
    ]
    assert torch.equal(
        search_range(x, INT4, granularity, candidates=5).high, torch.cat(rows)
    )


def test_of_equal_errors_the_largest_range_wins() -> None:
    # -1 is code -7 of scale 1/7, and code -8 of scale 1/8 (amax 7/8). Both candidates are exact.
    assert torch.equal(
        fake_quantize(torch.tensor([-1.0]), 0.875, INT4), torch.tensor([-1.0])
    )
    assert search_range(torch.tensor([-1.0]), INT4, candidates=33).high.item() == 1.0


def test_a_scale_shared_by_all_blocks_is_never_cut_into_pieces(
    generator: torch.Generator,
) -> None:
    granularity = PerBlock(16, 1)
    x = torch.randn(16, 16384, generator=generator) * torch.logspace(
        -3, 2, 16
    ).unsqueeze(1)
    largest = granularity.amax(x)
    errors = []
    fractions = [1.0, 0.6, 0.2]
    for fraction in fractions:
        quantized = fake_quantize(x, largest * fraction, E2M1, granularity, E4M3)
        errors.append(granularity.split(quantized - x).square().sum(2))
    # argmin names the first of equals, which is the largest fraction.
    chosen = torch.tensor(fractions)[torch.stack(errors).argmin(0)]
    torch.testing.assert_close(
        search_range(x, E2M1, granularity, scale_format=E4M3, candidates=3).high,
        largest * chosen,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_an_error(value: float) -> None:
    message = "search_range: got NaN or infinite values; expected a finite tensor"
    with pytest.raises(CalibrationError, match=message):
        search_range(torch.tensor([1.0, value]), INT8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outlier", [3.0, 7.0, 40.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_power_of_two_has_the_least_error_of_all(
    bits: int, outlier: float, symmetric: bool
) -> None:
    """Every power that could be meant is tried on the data themselves."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(bits))
    x[0] = outlier
    d = QuantDescriptor(
        bits,
        calib_method="mse",
        power_of_two=True,
        symmetric=symmetric,
        unsigned=not symmetric,
    )
    quantizer = TensorQuantizer(d)
    quantizer.start_calibration()
    quantizer.observe(x)
    quantizer.finish_calibration()
    assert quantizer.scale.log2().frac() == 0
    actual = (quantizer(x) - x).square().sum()
    least = torch.tensor(torch.inf)
    for exponent in range(-8, 4):
        amax = torch.tensor(2.0**exponent * d.format.qmax)
        low, high = (None, amax) if symmetric else (-amax / 2, amax / 2)
        scale_format = d.block_scale_format
        y = fake_quantize(x, high, d.format, d.granularity, scale_format, amin=low)
        least = torch.minimum(least, (y - x).square().sum())
    # A histogram knows values to within half a bin, and both ends of an asymmetric range move.
    assert actual <= 1.02 * least


def test_odd_tensors(low_dtype: torch.dtype, generator: torch.Generator) -> None:
    """Dead channels and empty tensors; low precision is searched in float32."""
    x = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    assert search_range(x, INT8, PerAxis((0,))).high[0].item() == 0.0
    assert search_range(torch.empty(0, 3), INT8, PerAxis((1,))).high.tolist() == [
        [0.0, 0.0, 0.0]
    ]
    assert search_range(torch.tensor(-3.0), INT8).high.item() == 3.0
    x = torch.randn(4, 64, generator=generator).to(low_dtype)
    with torch.inference_mode():
        amax = search_range(x, INT4, PerAxis((0,))).high
    assert amax.dtype is torch.float32
    assert not amax.is_inference()
    assert torch.equal(amax, search_range(x.float(), INT4, PerAxis((0,))).high)
    with pytest.raises(ConfigError, match="candidates: got 1; expected at least 2"):
        search_range(x, INT8, candidates=1)
