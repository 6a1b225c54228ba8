"""Nothing that runs for every batch waits for the device: a forward, a training step, collecting.

The detector is tested first.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.no_sync import NoSync
from torchq.calib import Calibrator, histogram, methods
from torchq.formats import INT8, UINT8, Granularity, PerAxis, PerBlock, PerTensor
from torchq.nn import tensor_quantizer

OFFENDERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "bincount": lambda x: torch.bincount(x.long()),
    "unique": lambda x: torch.unique(x),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_the_detector_catches_it(name: str) -> None:
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        OFFENDERS[name](torch.ones(3))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as off the CPU, where nothing may look at values."""
    monkeypatch.setattr(histogram, "is_on_host", lambda x: False)
    monkeypatch.setattr(tensor_quantizer, "takes_tiles", lambda x: False)


COLLECTORS: list[tuple[str, Granularity]] = [
    *(
        (method, granularity)
        for method in methods()
        for granularity in (PerTensor(), PerAxis((1,)))
    ),
    *((method, PerBlock(4)) for method in ("max", "moving_average")),
]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("method", "granularity"), COLLECTORS, ids=str)
def test_collecting(method: str, granularity: Granularity) -> None:
    for format in (INT8, UINT8):
        calibrator = Calibrator(method, format=format, granularity=granularity)
        with NoSync():
            for scale in (1.0, 100.0, 0.1):  # the bins widen on the way
                calibrator.collect(torch.randn(3, 5, 8) * scale)
        assert bool((calibrator.range().high > 0).all())


CONFIGS = {
    name: torchq.recipes.by_name(name)
    for name in ("int8", "int8_per_tensor", "w4a4", "fp8", "mxfp8", "nvfp4")
}
CONFIGS["asymmetric"] = torchq.recipes.int8(symmetric=False)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_step(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 4),
    )
    x = torch.randn(2, 3, 6, 6)
    target = torch.tensor([0, 3])
    torchq.quantize_(model, CONFIGS[name])
    torchq.calibrate(model, [x], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    with NoSync():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_uncalibrated_forward(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 4)
    ).eval()
    torchq.quantize_(model, CONFIGS[name])
    with NoSync(), torch.no_grad():
        y = model(torch.randn(2, 3, 6, 6))
    assert bool(y.isfinite().all())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_that_also_observes() -> None:
    model = nn.Linear(8, 4)
    torchq.quantize_(model)
    torchq.calibrate(model, [torch.randn(2, 8)], progress=False)
    model.input_quantizer.mode = "observe+quantize"
    model.input_quantizer.start_calibration("entropy")
    with NoSync():
        model(torch.randn(2, 8)).sum().backward()
    assert model.input_quantizer.calibrator.seen
