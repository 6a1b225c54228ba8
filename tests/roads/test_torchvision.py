"""torchvision's detectors: the backbone goes into the file, lists and boxes stay in Python."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.roads.end import ROAD, arrives

pytestmark = ROAD


class First(nn.Module):
    """The first map of a backbone, which returns a dictionary of maps."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = next(iter(self.backbone(x).values()))
        return maps


def test_after_training(tmp_path: Path) -> None:
    detection = pytest.importorskip("torchvision.models.detection")
    torch.manual_seed(0)
    build = detection.ssdlite320_mobilenet_v3_large
    detector: Any = build(weights=None, weights_backbone=None, num_classes=3).eval()
    images = torch.rand(2, 3, 96, 96)
    network = First(detector.backbone).eval()
    torchq.fuse_(network, images, progress=False)
    with torch.no_grad():
        in_float = network(images)
    torchq.quantize_(network, target="onnxruntime", example=images, progress=False)
    torchq.calibrate(network, [images], progress=False)
    detections = detector([torch.rand(3, 96, 96)])
    assert sorted(detections[0]) == ["boxes", "labels", "scores"]

    def error(run: Any) -> float:
        return float((run(images) - in_float).norm() / in_float.norm())

    arrives("torchvision", network, images, tmp_path / "net.onnx", error, within=0.05, dynamo=False)
