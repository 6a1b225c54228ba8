"""Read an ONNX file, quantize it, and write it again.

python examples/onnx_to_onnx.py float.onnx int8.onnx --photos photos/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image
from torchvision import transforms

import torchq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--target", default="onnxruntime", choices=torchq.targets())
    options = parser.parse_args()

    prepare = transforms.Compose(
        [
            transforms.Resize(options.size),
            transforms.CenterCrop(options.size),
            transforms.ToTensor(),
        ]
    )
    paths = sorted(path for path in options.photos.iterdir() if path.is_file())[:64]
    photos = torch.stack([prepare(Image.open(path).convert("RGB")) for path in paths])

    model = torchq.from_onnx(options.source, free_batch=True).eval()
    torchq.fuse_(model, photos[:1])
    report = torchq.quantize_(
        model, torchq.recipes.int8(), target=options.target, example=photos[:1]
    )
    print(str(report).splitlines()[-1])
    torchq.calibrate(model, photos.split(8))
    print(torchq.export_onnx(model, photos[:1], options.result, target=options.target))
    print(torchq.verify_onnx(model, options.result, photos.split(8)[:2]))


if __name__ == "__main__":
    main()
