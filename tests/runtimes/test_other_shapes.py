"""Calls of other engines with images and sequences of sizes that the example does not have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchq
from tests.lowering.common import calibrated
from torchq.errors import ExportError

pytest.importorskip("onnx")
ENGINES = pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])


def deployed(model: nn.Module, x: torch.Tensor, engine: str) -> tuple[nn.Module, nn.Module]:
    """Return the simulation, and the model on the engine."""
    pytest.importorskip(engine)
    return calibrated(model, x), torchq.deploy(model, x, target=engine, progress=False)


@ENGINES
@pytest.mark.parametrize("size", [(2, 2), (1, 9), (0, 0)], ids=str)
def test_images_that_are_smaller_than_a_kernel(engine: str, size: tuple[int, int]) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    x = torch.randn(2, 3, 9, 9)
    simulated, model = deployed(nn.Sequential(*layers), x, engine)
    model(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            simulated(torch.randn(2, 3, *size))
        with pytest.raises(ExportError, match=rf"{engine}: cannot run the model on inputs of sh"):
            model(torch.randn(2, 3, *size))
    other = torch.randn(3, 3, 4, 7)
    torch.testing.assert_close(model(other), simulated(other), rtol=0.1, atol=0.1)


@ENGINES
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 5, 8), (0, 0, 8)], ids=str)
def test_sequences_without_elements(engine: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    simulated, model = deployed(model, torch.randn(2, 5, 8), engine)
    x = torch.randn(shape)
    assert model(x).shape == simulated(x).shape
