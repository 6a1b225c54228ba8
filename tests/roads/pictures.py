"""Pictures with one bright rectangle each, that a small detector learns in half a minute."""

from pathlib import Path
from typing import Any

import pytest
import torch

#: A training of Ultralytics that learns these pictures; nbs=8 makes a step for each batch.
TRAINING: dict[str, Any] = {
    "imgsz": 64,
    "batch": 8,
    "nbs": 8,
    "warmup_epochs": 0,
    "optimizer": "SGD",
    "mosaic": 0.0,
    "scale": 0.1,
    "erasing": 0.0,
    "workers": 0,
    "device": "cpu",
    "plots": False,
    "verbose": False,
    "val": False,
}
_COUNTS = {"train": 48, "val": 16}


def write_pictures(folder: Path, *, outlines: bool = False) -> Path:
    """Write pictures and labels as Ultralytics reads them; the colour is the class.

    Args:
        folder: where to; made.
        outlines: label the outline of a rectangle, as for segmentation, instead of its box.

    Returns:
        The listing of the data set.
    """
    image = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    for split, count in _COUNTS.items():
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(
                60, 120, (64, 64, 3), generator=generator, dtype=torch.uint8
            )
            width, height = (20 + torch.randint(16, (2,), generator=generator)).tolist()
            left, top = torch.randint(28, (2,), generator=generator).tolist()
            pixels[top : top + height, left : left + width, number % 2] = 230
            image.fromarray(pixels.numpy()).save(
                folder / "images" / split / f"{number}.png"
            )
            right, bottom = left + width, top + height
            place = [(left + right) / 2, (top + bottom) / 2, width, height]
            if outlines:
                place = [left, top, right, top, right, bottom, left, bottom]
            numbers = " ".join(f"{length / 64}" for length in place)
            (folder / "labels" / split / f"{number}.txt").write_text(
                f"{number % 2} {numbers}\n"
            )
    listing = folder / "data.yaml"
    listing.write_text(
        f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [a, b]\n"
    )
    return listing
