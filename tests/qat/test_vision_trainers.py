"""A small real training run with the trainer of Ultralytics, by the recipe of docs/howto.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from torchq.workflow import quantizers

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "howto.md"


def recipe(
    containing: str, instead: tuple[str, str] = ("", ""), **names: Any
) -> dict[str, Any]:
    """Return the names that a code block of the page defines, with one text instead of another."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M
    )
    (block,) = (block for block in blocks if containing in block)
    actual = {"torch": torch, "torchq": torchq, **names}
    assert instead[0] in block
    exec(compile(block.replace(*instead), PAGE.name, "exec"), actual)
    return actual


def detection_data(folder: Path) -> Path:
    """Write eight noisy images with a box each for training and for validation."""
    image = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(8):
            pixels = torch.randint(
                256, (64, 64, 3), generator=generator, dtype=torch.uint8
            )
            image.fromarray(pixels.numpy()).save(
                folder / "images" / split / f"{number}.png"
            )
            label = folder / "labels" / split / f"{number}.txt"
            label.write_text(f"{number % 2} 0.5 0.5 0.4 0.4\n")
    listing = folder / "data.yaml"
    listing.write_text(
        f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [a, b]\n"
    )
    return listing


# A short training: nbs=4 makes a step of the optimizer for each batch.
SHORT: dict[str, Any] = {
    "epochs": 2,
    "imgsz": 64,
    "batch": 4,
    "nbs": 4,
    "warmup_epochs": 0,
    "optimizer": "SGD",
    "workers": 0,
    "device": "cpu",
    "plots": False,
    "verbose": False,
}


def test_the_trainer_of_ultralytics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "True")
    ultralytics = pytest.importorskip(
        "ultralytics", reason="the test is about ultralytics"
    )
    model = ultralytics.YOLO("yolov8n.yaml")
    quantize = recipe("def quantize(trainer)")["quantize"]
    model.add_callback("on_pretrain_routine_end", quantize)
    started: list[dict[str, torch.Tensor]] = []
    model.add_callback(
        "on_train_start",
        lambda trainer: started.append(
            {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        ),
    )
    model.train(
        data=str(detection_data(tmp_path / "data")), project=str(tmp_path), **SHORT
    )
    trainer = model.trainer
    moved = [
        n
        for n, p in trainer.model.named_parameters()
        if not torch.equal(p, started[0][n])
    ]
    # The optimizer trains the quantized layers.
    assert len(moved) > 0.5 * len(started[0])
    for path in (trainer.best, trainer.last):
        network = ultralytics.YOLO(path).model.float().eval()
        actual = quantizers(network)
        assert len(actual) == len(quantizers(trainer.model)) > 100
        assert all(q.calibrated for q in actual.values())
        x = torch.rand(1, 3, 64, 64)
        with torch.no_grad():
            expected = network(x)[0]
            network.fuse()
            got = network(x)[0]
        # fuse() folds BatchNorms, which changes no code; a value at a tie may still fall otherwise.
        assert (got - expected).norm() < 1e-3 * expected.norm()
        assert len(quantizers(network)) == len(actual)
