"""torchvision's detectors: the backbone goes into the file, lists and boxes stay in Python."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.roads.end import ROAD, arrives

pytestmark = ROAD


class Maps(nn.Module):
    """The maps of a backbone, which a detector reads."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(self.backbone(x))


def give_statistics(network: nn.Module, images: torch.Tensor) -> None:
    """Let BatchNorms of random weights have the statistics of images, as after training."""
    norms = [
        module for module in network.modules() if isinstance(module, nn.BatchNorm2d)
    ]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        network.train()(images)
    network.eval()


def test_after_training(tmp_path: Path) -> None:
    pytest.importorskip(
        "ultralytics", reason="roads are walked where their packages are"
    )
    detection = pytest.importorskip("torchvision.models.detection")
    torch.manual_seed(0)
    build = detection.fasterrcnn_mobilenet_v3_large_320_fpn
    detector: Any = build(weights=None, weights_backbone=None, num_classes=3).eval()
    images = torch.rand(8, 3, 96, 96)
    network = Maps(detector.backbone).eval()
    give_statistics(network, images)
    folds = torchq.fuse_(network, images, progress=False)
    assert folds.applied, folds
    with torch.no_grad():
        in_float = network(images)["0"]
    torchq.quantize_(network, target="onnxruntime", example=images, progress=False)
    torchq.calibrate(network, [images], progress=False)
    detections = detector([torch.rand(3, 96, 96)])
    assert sorted(detections[0]) == ["boxes", "labels", "scores"]
    torchq.save(network, tmp_path / "maps.pt")
    fresh = Maps(build(weights=None, weights_backbone=None, num_classes=3).backbone)
    loaded = torchq.load(fresh.eval(), tmp_path / "maps.pt")
    with torch.no_grad():
        assert torch.equal(loaded(images)["0"], network(images)["0"])
    network = loaded

    def error(run: Any) -> float:
        return float((run(images) - in_float).norm() / in_float.norm())

    path = tmp_path / "net.onnx"
    arrives("torchvision", network, images, path, error, within=0.05, dynamo=False)
