"""Every registered method keeps the calibrator contract.

Each runs per tensor and per channel, signed and unsigned, with integer and float formats.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.contracts.calibrator_contract import SHAPE, CalibratorContract, Make, collected, sample
from torchq.calib import make_calibrator, methods
from torchq.errors import CalibrationError
from torchq.formats import E4M3, INT8, UINT8, Format, Granularity, PerAxis, PerTensor

CASES: list[tuple[str, Format, Granularity]] = [
    *(
        (method, INT8, granularity)
        for method in methods()
        for granularity in (PerTensor(), PerAxis((1,)))
    ),
    *((method, E4M3, PerTensor()) for method in methods()),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{type(case[2]).__name__}")
def case(request: pytest.FixtureRequest) -> tuple[str, Format, Granularity]:
    return request.param


@pytest.fixture
def make(case: tuple[str, Format, Granularity]) -> Make:
    method, format, granularity = case
    return partial(make_calibrator, method, format=format, granularity=granularity)


@pytest.fixture
def sequential(case: tuple[str, Format, Granularity]) -> bool:
    return case[0] == "moving_average"


class TestRegistered(CalibratorContract):
    pass


@pytest.mark.parametrize("method", methods())
def test_channels_equal_a_calibrator_for_each(method: str, generator: torch.Generator) -> None:
    x = sample(generator)
    together = make_calibrator(method, format=INT8, granularity=PerAxis((1,)))
    each = [make_calibrator(method, format=INT8, granularity=PerTensor()) for _ in range(SHAPE[1])]
    for batch in x.split(2):
        together.collect(batch)
        for channel, calibrator in enumerate(each):
            calibrator.collect(batch[:, channel])
    assert torch.equal(together.range().high.flatten(), torch.stack([c.range().high for c in each]))


@pytest.mark.parametrize("method", methods())
def test_axes_are_those_of_the_amax_shape(method: str, generator: torch.Generator) -> None:
    x = torch.randn(3, 4, 2, 5, generator=generator) * torch.arange(1.0, 9).view(1, 4, 2, 1)
    for axes in ((1, 2), (2, 1), (-2, 1)):
        calibrator = make_calibrator(method, format=INT8, granularity=PerAxis(axes))
        calibrator.collect(x)
        amax = calibrator.range().high
        assert amax.shape == (1, 4, 2, 1)
        alone = collected(
            partial(make_calibrator, method, format=INT8, granularity=PerTensor()), x[:, 3, 1]
        )
        assert torch.equal(amax[0, 3, 1, 0], alone.range().high)


@pytest.mark.parametrize("method", methods())
def test_another_number_of_channels_is_an_error(method: str) -> None:
    calibrator = make_calibrator(method, format=INT8, granularity=PerAxis((1,)))
    calibrator.collect(torch.ones(2, 3))
    with pytest.raises(
        CalibrationError,
        match=r"got a tensor whose amax has shape \(1, 4\); expected \(1, 3\) as before",
    ):
        calibrator.collect(torch.ones(2, 4))


@pytest.mark.parametrize("method", methods())
def test_unsigned_formats_ignore_what_they_clamp_away(
    method: str, generator: torch.Generator
) -> None:
    x = torch.randn(1000, generator=generator)
    make = partial(make_calibrator, method, format=UINT8, granularity=PerTensor())
    from_signs = collected(make, torch.cat([x, -100 * x.abs()]))
    from_zeros = collected(make, torch.cat([x.relu(), torch.zeros(1000)]))
    assert torch.equal(from_signs.range().high, from_zeros.range().high)
