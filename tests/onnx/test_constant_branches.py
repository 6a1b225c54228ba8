"""Branches that follow from no input, such as tables of positions, in exported files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Positions(nn.Module):
    """Patches of an image, to which projected sines of their places are added."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.project = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        places = torch.linspace(-3, 3, x.shape[2]).reshape(1, 1, -1, 1).expand(1, 2, -1, x.shape[3])
        table = torch.cat([places.sin(), places.cos()], 1)
        return self.head((x + self.project(table)).mean((2, 3)))


def exported(path: Path, dynamo: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Positions().eval(), torch.randn(4, 3, 32, 32)
    torchq.quantize_(model, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=dynamo)
    return model, x


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_table_of_positions_agrees_with_its_model(dynamo: bool, tmp_path: Path) -> None:
    model, x = exported(tmp_path / "m.onnx", dynamo)
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [x])
    assert report.ok, str(report)


def test_a_changed_table_is_found(tmp_path: Path) -> None:
    model, x = exported(tmp_path / "m.onnx", True)
    assert isinstance(model.project, nn.Conv2d)
    with torch.no_grad():
        model.project.weight.mul_(-1)
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [x])
    assert not report.ok
