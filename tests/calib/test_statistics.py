"""The magnitude of each group against gathering the group's elements by index."""

from __future__ import annotations

import pytest
import torch

from tests.functional.group_cases import GRANULARITIES, groups_of
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
