"""``deploy(model, example)`` compares its result with the simulation."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.deployment.common import calibrated, sqnr


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


class Evasive(nn.Module):
    """Computes something else while it is traced."""

    def __init__(self, factor: float = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (1 if type(x) is Tensor else self.factor)


def test_an_example_shows_a_trace_that_went_wrong(images: Tensor) -> None:
    model = calibrated(Evasive(), images)
    with pytest.raises(
        torchq.errors.ExportError, match=r"deploy: result 0 has relative error 4 against the simulation; expected at most 0.1, or"
    ):
        torchq.deploy(model, images)
    assert sqnr(torchq.deploy(model, images, chains=False)(images), model(images)) > 40


def test_the_noise_of_quantization_is_no_error(images: Tensor) -> None:
    model = calibrated(Evasive(1.15), images)
    with pytest.raises(torchq.errors.ExportError, match=r"result 0 has relative error 0.15 against the simulation"):
        torchq.deploy(model, images)
    coarse = torchq.restore_(model)
    weight = torchq.QuantDescriptor(2, axis=0)
    torchq.quantize_(coarse, torchq.QuantConfig((torchq.Rule("*", input=torchq.QuantDescriptor(8), weight=weight),)))
    torchq.calibrate(coarse, [images], progress=False)
    torchq.deploy(coarse, images)
