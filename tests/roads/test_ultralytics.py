"""Ultralytics: by the blocks of docs/howto.md, to a file, measured by its own ``val``."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from tests.qat.test_vision_trainers import SHORT, detection_data, recipe
from tests.roads.end import ROAD

pytestmark = ROAD
IMAGE = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def yolo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "True")
    return pytest.importorskip("ultralytics", reason="the road is Ultralytics'").YOLO


def measured(model: Any, data: Path, folder: Path) -> float:
    """Return the mAP of Ultralytics' own validation, which fuses once more."""
    settings = {"imgsz": 64, "batch": 4, "device": "cpu", "plots": False, "workers": 0}
    found = model.val(data=str(data), project=str(folder), verbose=False, **settings)
    return float(found.box.map)


def check(network: Any, path: Path, road: str) -> None:
    """Check that a file runs on integers, as the plan said."""
    inspected = torchq.inspect_onnx(path)
    coverage = inspected.coverage
    assert coverage is not None and coverage.share is not None
    planned = torchq.swap.plan_of(network).share
    print(f"\n{road}: {coverage}, {len(inspected.integer)} of {len(inspected.nodes)} nodes")
    assert coverage.share > 0.8, coverage.reason
    assert planned is None or abs(coverage.share - planned.quantized) < 0.1
    assert torchq.verify_onnx(network, path, [IMAGE], progress=False).ok


def test_training_and_export(yolo: Any, tmp_path: Path) -> None:
    model = recipe("def quantize(trainer)", YOLO=yolo)["model"]
    data = detection_data(tmp_path / "data")
    model.train(data=str(data), project=str(tmp_path), **SHORT)
    export = recipe("def export(checkpoint", YOLO=yolo)["export"]
    path = tmp_path / "best.onnx"
    network = export(model.trainer.best, IMAGE, path)
    check(network, path, "Ultralytics QAT")
    with torch.no_grad():
        before = network(IMAGE)[0]
    fused = yolo(model.trainer.best)
    fused.model = network
    measured(fused, data, tmp_path)
    fused.predict(source=IMAGE, imgsz=64, device="cpu", verbose=False)
    with torch.no_grad():
        assert torch.equal(network(IMAGE)[0], before)


def test_after_training(yolo: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = yolo("yolo11n.yaml")
    data = detection_data(tmp_path / "data")
    network = model.model.float().eval()
    torchq.fuse_(network, IMAGE, progress=False)
    in_float = measured(model, data, tmp_path)
    torchq.quantize_(
        network, exclude=["*.dfl.*"], target="onnxruntime", example=IMAGE, progress=False
    )
    torchq.calibrate(network, [IMAGE], progress=False)
    simulated = measured(model, data, tmp_path)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(network, IMAGE, path, dynamo=False, progress=False)
    check(network, path, f"Ultralytics PTQ, mAP {in_float:.3f} / {simulated:.3f}")
