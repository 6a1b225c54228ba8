"""Ultralytics: by the blocks of docs/howto.md, to a file, measured by its own ``val``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.qat.test_vision_trainers import recipe
from tests.roads.detectors import Trained
from tests.roads.end import ROAD
from torchq.graph import tensors_in
from torchq.swap import plan_of

pytestmark = ROAD


def check_end(trained: Trained, network: nn.Module, path: Path, road: str) -> None:
    """Check that a file runs on integers, as the plan said, with the metric of the simulation."""
    images = trained.images()
    report = torchq.verify_onnx(network, path, [images], progress=False)
    assert report.ok, report
    assert report.coverage is not None and report.coverage.share is not None
    planned = plan_of(network).share
    assert planned is not None
    assert abs(report.coverage.share - planned.quantized) < 0.05
    assert report.coverage.share > 0.9
    with torch.no_grad():
        before = next(tensors_in(network(images)))
    simulated = trained.measured(trained.checkpoint, network)
    with torch.no_grad():
        assert torch.equal(
            next(tensors_in(network(images))), before
        )  # Ultralytics has fused nothing more
    in_file = trained.measured_file(network, path)
    metrics = (
        f"{trained.metric:.3f} float / {simulated:.3f} simulation / {in_file:.3f} file"
    )
    print(f"\n{road}: {report.coverage}, mAP {metrics}")
    # Values at a tie between two codes move a box by a pixel of 64 at most.
    assert abs(in_file - simulated) < 0.02
    assert simulated > trained.metric - 0.1


@pytest.fixture
def trained(kind: str, request: pytest.FixtureRequest) -> Trained:
    found: Trained = request.getfixturevalue(kind)
    return found


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("detector", "onnxruntime"),
        ("detector", "openvino"),
        ("segmenter", "onnxruntime"),
        ("segmenter", "openvino"),
    ],
)
def test_training_and_export(
    kind: str, target: str, trained: Trained, yolo: Any, tmp_path: Path
) -> None:
    instead = 'TARGET = "openvino"', f'TARGET = "{target}"'
    page = recipe("def quantize(trainer)", instead)
    if target == "onnxruntime":
        page["CONFIG"] = None
    model = yolo(trained.checkpoint)
    model.add_callback("on_pretrain_routine_end", page["quantize"])
    trained.train(model, epochs=2, lr0=1e-3)
    path = tmp_path / "best.onnx"
    network = page["export"](model.trainer.last, trained.images(), path)
    check_end(trained, network, path, f"Ultralytics QAT, {kind}, {target}")


@pytest.mark.parametrize("kind", ["detector", "segmenter"])
def test_after_training(kind: str, trained: Trained, yolo: Any, tmp_path: Path) -> None:
    model = yolo(trained.checkpoint)
    network = model.model.float().eval()
    images = trained.images()
    torchq.fuse_(model, images, progress=False)
    options = {"target": "onnxruntime", "example": images, "progress": False}
    torchq.quantize_(model, exclude=["*.dfl.*"], **options)
    torchq.calibrate(model, [images], progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, images, path, dynamo=False, progress=False)
    check_end(trained, network, path, f"Ultralytics PTQ, {kind}")
