"""Quantize a YOLO of Ultralytics after training, and show how its trainer trains it quantized.

python examples/ultralytics_yolo.py --model yolov8n.yaml --size 160
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
from ultralytics import YOLO
from ultralytics.utils.torch_utils import ModelEMA

import torchq

# The weights of DFL are fixed numbers 0 to 15, and the box distances that it computes need them.
EXCLUDE = ["*.dfl.*"]


def quantize_at_start(trainer: object) -> None:
    """Quantize a trainer's model: a callback for "on_pretrain_routine_end"."""
    images = [
        trainer.preprocess_batch(batch)["img"]
        for batch in islice(trainer.train_loader, 16)
    ]
    training = trainer.model.training
    options = {"target": "onnxruntime", "example": images[0]}
    torchq.quantize_(trainer.model.eval(), exclude=EXCLUDE, **options)
    torchq.calibrate(trainer.model, images, correct=False)
    trainer.model.train(training)
    trainer.ema = ModelEMA(trainer.model)  # the copy that is validated and saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="yolov8n.yaml", help="a .yaml, or trained weights .pt"
    )
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument(
        "--train", metavar="DATA.yaml", help="also train it quantized, one epoch"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    # Take images of your data set here.
    images = torch.rand(4, 3, options.size, options.size)
    network = YOLO(options.model).model.float().eval()
    with torch.no_grad():
        expected = network(images)[0]
    torchq.fuse_(network, images[:1])
    report = torchq.quantize_(
        network, exclude=EXCLUDE, target="onnxruntime", example=images[:1]
    )
    print(str(report).splitlines()[-1])
    torchq.calibrate(network, images.split(2), method="entropy")
    with torch.no_grad():
        error = network(images)[0] - expected
    print(f"signal to noise: {20 * torch.log10(expected.norm() / error.norm()):.0f} dB")

    int8 = torchq.deploy(network, images[:1])
    with torch.no_grad():
        print("boxes and classes on integers:", tuple(int8(images[:1])[0].shape))

    if options.train:
        model = YOLO(options.model)
        model.add_callback("on_pretrain_routine_end", quantize_at_start)
        model.train(
            data=options.train,
            epochs=1,
            imgsz=options.size,
            optimizer="SGD",  # "auto" takes another rate than lr0
            lr0=1e-3,
        )


if __name__ == "__main__":
    main()
