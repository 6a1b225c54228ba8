"""The program that compares evaluation with a session proves something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("torchvision")

from benchmarks.evaluation import settle_


class Dull(nn.Module):
    """A network whose head begins with zeros, as that of a vision transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_outputs_of_a_settled_network_tell_images_apart() -> None:
    torch.manual_seed(0)
    model = Dull().eval()
    x = torch.randn(16, 3, 8, 8)
    assert torch.equal(
        model(x)[0],
        model(x)[1],
    )
    settle_(model, [x])
    assert not torch.allclose(model(x)[0], model(x)[1], rtol=0.01)
    assert not model.norm.training
    assert int(model.norm.num_batches_tracked) == 1
    with torch.no_grad():
        model.norm.weight.zero_()
    with pytest.raises(RuntimeError, match="all images have one output"):
        settle_(model, [x])
