"""Methods of least error with scales that are powers of two."""

from __future__ import annotations

import pytest
import torch

from torchq import QuantDescriptor
from torchq.functional import fake_quantize
from torchq.nn import TensorQuantizer


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outlier", [3.0, 7.0, 40.0])
@pytest.mark.parametrize(("method", "power"), [("mse", 2.0), ("lp", 2.4)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_power_has_the_least_error_of_all(
    bits: int, outlier: float, method: str, power: float, symmetric: bool
) -> None:
    """Every power that could be meant is tried on the data themselves."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(bits))
    x[0] = outlier
    d = QuantDescriptor(
        bits, calib_method=method, power_of_two=True, symmetric=symmetric, unsigned=not symmetric
    )
    quantizer = TensorQuantizer(d)
    quantizer.start_calibration()
    quantizer.observe(x)
    quantizer.finish_calibration()
    assert quantizer.scale.log2().frac() == 0
    found = (quantizer(x) - x).abs().pow(power).sum()
    least = torch.tensor(torch.inf)
    for exponent in range(-8, 4):
        amax = torch.tensor(2.0**exponent * d.format.qmax)
        low, high = (None, amax) if symmetric else (-amax / 2, amax / 2)
        scale_format = d.block_scale_format
        y = fake_quantize(x, high, d.format, d.granularity, scale_format, amin=low)
        least = torch.minimum(least, (y - x).abs().pow(power).sum())
    # A histogram knows values to within half a bin, and both ends of an asymmetric range move.
    assert found <= 1.02 * least


def test_ranges_without_powers_stay() -> None:
    """The same data give the range of before where scales are not rounded."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    ranges = []
    for power_of_two in (False, True):
        quantizer = TensorQuantizer(
            QuantDescriptor(4, calib_method="mse", power_of_two=power_of_two)
        )
        quantizer.start_calibration()
        quantizer.observe(x)
        quantizer.finish_calibration()
        ranges.append(float(quantizer.amax))
    assert ranges[0] != ranges[1] and ranges[0] < float(x.abs().max())
