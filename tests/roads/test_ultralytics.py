"""Ultralytics: by the blocks of docs/howto.md, to a file, measured by its own ``val``."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.qat.test_vision_trainers import recipe
from tests.roads.end import ROAD, run_file
from tests.roads.pictures import TRAINING, write_pictures
from torchq.graph import tensors_in
from torchq.swap import plan_of

pytestmark = ROAD


@pytest.fixture(scope="module")
def yolo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.mktemp("settings")))
        patch.setenv("YOLO_OFFLINE", "True")
        yield pytest.importorskip("ultralytics", reason="the road is Ultralytics'").YOLO


class Trained:
    """A float detector that Ultralytics trained, its pictures, and its metric."""

    def __init__(self, yolo: Any, name: str, folder: Path) -> None:
        self._yolo = yolo
        self._folder = folder
        self.data = write_pictures(folder / "data", outlines="seg" in name)
        self.checkpoint = folder / "float.pt"
        torch.manual_seed(0)
        model = yolo(name)
        self.train(model, epochs=40, lr0=2e-2)
        shutil.copy(model.trainer.last, self.checkpoint)
        self.metric = self.measured(self.checkpoint)

    def train(self, model: Any, **settings: Any) -> None:
        """Let the trainer of Ultralytics train."""
        model.train(
            data=str(self.data), project=str(self._folder), **settings, **TRAINING
        )

    def images(self) -> Tensor:
        """Return two pictures as the network sees them."""
        image = pytest.importorskip("PIL.Image")
        numpy = pytest.importorskip("numpy")
        paths = sorted((self.data.parent / "images" / "val").iterdir())[:2]
        pixels = [torch.from_numpy(numpy.array(image.open(path))) for path in paths]
        return torch.stack(pixels).permute(0, 3, 1, 2) / 255

    def measured(self, checkpoint: Path, network: nn.Module | None = None) -> float:
        """Return the mAP of Ultralytics' own validation, which fuses once more."""
        model = self._yolo(checkpoint)
        model.model = model.model if network is None else network
        # Pictures as large as the network saw them: without padding to rectangles.
        settings = {
            "imgsz": 64,
            "rect": False,
            "batch": 8,
            "workers": 0,
            "plots": False,
        }
        project = str(self._folder)
        results = model.val(
            data=str(self.data),
            project=project,
            device="cpu",
            verbose=False,
            **settings,
        )
        return float(getattr(results, "seg", results.box).map)

    def measured_file(self, network: nn.Module, path: Path) -> float:
        """Return the mAP of a file, in the place of its network."""

        def forward(images: Tensor, **_: Any) -> Any:
            results = iter(run_file(path, {"x": images}))
            boxes = next(results)
            prototypes = [result for result in results if result.dim() == 4][-1:]
            return (boxes, *prototypes) if is_segmentation else boxes

        is_segmentation = type(network).__name__.startswith("Segmentation")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "forward", forward)
            return self.measured(self.checkpoint, network)


@pytest.fixture(scope="module")
def detector(yolo: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(yolo, "yolov8n.yaml", tmp_path_factory.mktemp("detect"))


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


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_training_and_export(
    target: str, detector: Trained, yolo: Any, tmp_path: Path
) -> None:
    # Sums of 8-bit weights overflow the kernels of CPUs without VNNI in OpenVINO.
    recipes = {
        "onnxruntime": "",
        "openvino": "config=torchq.recipes.int8(reduce_range=True), ",
    }
    instead = 'target="onnxruntime"', f'{recipes[target]}target="{target}"'
    quantize = recipe("def quantize(trainer)", instead, YOLO=yolo)["quantize"]
    model = yolo(detector.checkpoint)
    model.add_callback("on_pretrain_routine_end", quantize)
    detector.train(model, epochs=2, lr0=1e-3)
    path = tmp_path / "best.onnx"
    export = recipe("def export(checkpoint", YOLO=yolo)["export"]
    network = export(model.trainer.last, detector.images()[:1], path)
    check_end(detector, network, path, f"Ultralytics QAT, {target}")


@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolov8n-seg.yaml"])
def test_after_training(
    name: str, detector: Trained, yolo: Any, tmp_path: Path
) -> None:
    trained = Trained(yolo, name, tmp_path) if "seg" in name else detector
    model = yolo(trained.checkpoint)
    network = model.model.float().eval()
    images = trained.images()
    torchq.fuse_(model, images, progress=False)
    options = {"target": "onnxruntime", "example": images, "progress": False}
    torchq.quantize_(model, exclude=["*.dfl.*"], **options)
    torchq.calibrate(model, [images], progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, images, path, dynamo=False, progress=False)
    check_end(trained, network, path, f"Ultralytics PTQ, {name}")
