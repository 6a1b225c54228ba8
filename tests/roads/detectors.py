"""Small detectors that Ultralytics trained, and what its own validation says of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.roads.end import run_file
from tests.roads.pictures import TRAINING, write_pictures
from torchq.graph import tensors_in


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
        return self._measured_by(forward, network)

    def measured_deployed(self, network: nn.Module, deployed: nn.Module) -> float:
        """Return the mAP of a deployed model of one picture, in the place of its network."""

        def forward(images: Tensor, **_: Any) -> Any:
            with torch.no_grad():
                results = (next(tensors_in(deployed(one[None]))) for one in images)
                return torch.cat(list(results))

        return self._measured_by(forward, network)

    def _measured_by(self, forward: Callable[..., Any], network: nn.Module) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "forward", forward)
            return self.measured(self.checkpoint, network)
