"""Every registered method keeps the calibrator contract.

Each runs per tensor and per channel, with integer and float formats, and for asymmetric ranges.
"""

from functools import partial
from typing import Any

import pytest
import torch

from tests.contracts.calibrator_contract import (
    SHAPE,
    CalibratorContract,
    Make,
    found,
    sample,
)
from torchq.calib import Calibrator, methods
from torchq.errors import CalibrationError
from torchq.formats import E4M3, INT8, UINT8, PerAxis, PerTensor
from torchq.functional import Range

KINDS: list[dict[str, Any]] = [
    {"format": INT8, "granularity": PerTensor()},
    {"format": INT8, "granularity": PerAxis((1,))},
    {"format": E4M3, "granularity": PerTensor()},
    {"format": UINT8, "granularity": PerTensor(), "symmetric": False},
]
CASES = [(method, kind) for kind in KINDS for method in methods()]


@pytest.fixture(
    params=CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}"
)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param


@pytest.fixture
def make(case: tuple[str, dict[str, Any]]) -> Make:
    return partial(Calibrator, case[0], **case[1])


@pytest.fixture
def sequential(case: tuple[str, dict[str, Any]]) -> bool:
    return case[0] == "moving_average"


class TestRegistered(CalibratorContract):
    pass


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", methods())
def test_channels_equal_a_calibrator_for_each(
    method: str, symmetric: bool, generator: torch.Generator
) -> None:
    kind = partial(Calibrator, method, format=INT8, symmetric=symmetric)
    batches = sample(generator).split(2)
    together = found(partial(kind, granularity=PerAxis((1,))), *batches)
    alone = partial(kind, granularity=PerTensor())
    each = [
        found(alone, *(b[:, channel] for b in batches)) for channel in range(SHAPE[1])
    ]
    for end in range(1 if symmetric else 2):
        assert torch.equal(
            together[end].flatten(), torch.stack([one[end] for one in each])
        )


@pytest.mark.parametrize("method", methods())
def test_axes_are_those_of_the_amax_shape(
    method: str, generator: torch.Generator
) -> None:
    x = torch.randn(3, 4, 2, 5, generator=generator) * torch.arange(1.0, 9).view(
        1, 4, 2, 1
    )
    alone = partial(Calibrator, method, format=INT8, granularity=PerTensor())
    for axes in ((1, 2), (2, 1), (-2, 1)):
        make = partial(Calibrator, method, format=INT8, granularity=PerAxis(axes))
        amax = found(make, x).high
        assert amax.shape == (1, 4, 2, 1)
        assert torch.equal(
            amax[0, 3, 1, 0],
            found(alone, x[:, 3, 1]).high,
        )


@pytest.mark.parametrize("method", methods())
def test_another_number_of_channels_is_an_error(method: str) -> None:
    calibrator = Calibrator(method, format=INT8, granularity=PerAxis((1,)))
    calibrator.collect(torch.ones(2, 3))
    message = r"got a tensor whose amax has shape \(1, 4\); expected \(1, 3\) as before"
    with pytest.raises(CalibrationError, match=message):
        calibrator.collect(torch.ones(2, 4))


@pytest.mark.parametrize("method", methods())
def test_unsigned_formats_ignore_what_they_clamp_away(
    method: str, generator: torch.Generator
) -> None:
    x = torch.randn(1000, generator=generator)
    make = partial(Calibrator, method, format=UINT8, granularity=PerTensor())
    from_signs = found(make, torch.cat([x, -100 * x.abs()]))
    assert from_signs == Range(
        found(make, torch.cat([x.relu(), torch.zeros(1000)])).high
    )
