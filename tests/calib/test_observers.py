"""What observers see of one tensor: magnitudes of groups, and negative values, by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torchq
from tests.functional.group_cases import GRANULARITIES, groups_of
from torchq.calib import HistogramCalibrator, MaxCalibrator
from torchq.calib.observer import magnitude
from torchq.formats import Granularity, PerAxis, PerTensor
from torchq.functional.kernels import group_view


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("signed", [True, False])
def test_magnitude_is_the_largest_that_the_format_can_represent(
    granularity: Granularity, signed: bool
) -> None:
    x = torch.arange(120.0).view(4, 6, 5) - 40
    amax, finite, negative = magnitude(group_view(x, granularity), signed=signed)
    assert finite
    assert negative is None if signed else bool(negative)
    for number, values in groups_of(x, granularity).items():
        assert amax[number].item() == max(abs(v) if signed else max(v, 0.0) for v in values)


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis((1,))], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("signed", [True, False])
def test_magnitude_of_non_finite_data_is_zero(
    granularity: Granularity, value: float, signed: bool
) -> None:
    x = torch.ones(4, 6, 5)
    x[1, 2, 3] = value
    amax, finite, _ = magnitude(group_view(x, granularity), signed=signed)
    assert not finite
    assert amax.count_nonzero() == 0


def model(unsigned: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    rule = torchq.Rule(
        "*", input=torchq.QuantDescriptor(unsigned=unsigned), weight=torchq.QuantDescriptor(axis=0)
    )
    torchq.quantize_(net, torchq.QuantConfig((rule,)))
    return net


@pytest.mark.parametrize("method", ["max", "entropy"])
def test_calibration_names_the_quantizer(method: str) -> None:
    batches = [torch.rand(3, 4), torch.rand(3, 4) - 0.5, torch.rand(3, 4)]
    with pytest.warns(
        UserWarning,
        match=r"0\.input_quantizer: got negative values in 1 of 3 batches; uint8 makes them 0",
    ) as caught:
        torchq.calibrate(model(True), batches, method=method, progress=False)
    assert len(caught) == 1


@pytest.mark.parametrize(("unsigned", "shift"), [(True, 0.0), (False, 0.5)])
def test_nothing_is_said_where_nothing_is_lost(unsigned: bool, shift: float) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchq.calibrate(model(unsigned), [torch.rand(3, 4) - shift], progress=False)
    assert not caught


@pytest.mark.parametrize("make", [MaxCalibrator, HistogramCalibrator])
def test_negative_batches_add_up(make: type[MaxCalibrator] | type[HistogramCalibrator]) -> None:
    calibrator = make(unsigned=True)
    for x in ([1.0, 2.0], [-1.0, 2.0], [-1.0, 2.0]):
        calibrator.collect(torch.tensor(x))
    assert calibrator.negative_batches == 2
    calibrator.reset()
    assert calibrator.observer.negative is None
