"""Quantize a torchvision network with a folder of photos, and write a file for ONNX Runtime.

    python examples/ptq_photos.py photos/ --model mobilenet_v2 --weights DEFAULT

Without --weights the network has random weights: good for a look at the steps, not at accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image
from torchvision import models, transforms

import torchq

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read_photos(folder: Path, size: int, limit: int) -> torch.Tensor:
    """Return up to ``limit`` photos of a folder as one batch, as the network wants them."""
    prepare = transforms.Compose(
        [
            transforms.Resize(size),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    kinds = {".jpg", ".jpeg", ".png"}
    paths = [
        path for path in sorted(folder.rglob("*")) if path.suffix.lower() in kinds
    ][:limit]
    if not paths:
        raise SystemExit(f"{folder}: no .jpg or .png file is in it")
    return torch.stack([prepare(Image.open(path).convert("RGB")) for path in paths])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights", help="DEFAULT downloads trained weights")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--limit", type=int, default=64, help="photos for calibration")
    parser.add_argument("--export", type=Path, default=Path("int8.onnx"))
    options = parser.parse_args()

    torch.manual_seed(0)
    model = models.get_model(options.model, weights=options.weights).eval()
    photos = read_photos(options.photos, options.size, options.limit)
    with torch.no_grad():
        expected = model(photos)

    torchq.fuse_(model, photos[:1])
    report = torchq.quantize_(
        model, torchq.recipes.int8(), target="onnxruntime", example=photos[:1]
    )
    print(report)
    torchq.calibrate(model, photos.split(8), method="entropy")

    with torch.no_grad():
        same = (model(photos).argmax(1) == expected.argmax(1)).float().mean()
    print(f"the class of FP32 for {same:.0%} of {len(photos)} photos")
    print(torchq.export_onnx(model, photos[:1], options.export, target="onnxruntime"))
    print(torchq.verify_onnx(model, options.export, photos.split(8)[:2]))


if __name__ == "__main__":
    main()
