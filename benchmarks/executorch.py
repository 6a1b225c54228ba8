"""Compare INT8 with float32 in ExecuTorch: ResNet-20 on CIFAR-10, and its time for one image.

The network has trained weights; both files are lowered for XNNPACK and take one image. Accuracy,
classes and decibels compare a file with the model in PyTorch that it was made from. Times are
seconds of the processor, in all threads of the process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import torchq
from benchmarks import cifar
from benchmarks.harness import Reporter, compare, decibels, parse, parser, timing
from torchq.runtimes import ExecuTorch


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, required=True, help="of the images and weights")
    arguments.add_argument("--images", type=int, default=10_000, help="of the test split")
    options = parse(arguments, argv)
    train = cifar.read_split(options.data, "train", 512)
    test = cifar.read_split(options.data, "test", options.images)
    model = cifar.resnet20(options.data)
    image = test.images[:1]
    torchq.fuse_(model, (image,))
    torchq.quantize_(model, target="executorch", example=image)
    torchq.calibrate(model, train.batches(64), progress=False)
    expected = {"int8": cifar.logits(model, test)}
    with torchq.disabled(model):
        expected["float32"] = cifar.logits(model, test)
    settings = {"int8": ExecuTorch(), "float32": ExecuTorch(quantized=False)}
    with Reporter("executorch", options.out, ["executorch"]) as reporter, torch.no_grad():
        files = {n: torchq.deploy(model, image, target=s) for n, s in settings.items()}
        calls = {name: partial(file, image) for name, file in files.items()}
        how = {**timing(options), "clock": time.process_time}
        for row in compare(calls, baseline="float32", **how):
            file, simulated = files[row.candidate], expected[row.candidate]
            got = cifar.logits(file, test, size=1)
            reporter.timing(
                row,
                images=len(test.images),
                accuracy=cifar.accuracy(got, test),
                simulated=cifar.accuracy(simulated, test),
                same=(got.argmax(1) == simulated.argmax(1)).float().mean().item(),
                decibels=decibels(got, simulated),
                kilobytes=file.graph.numel() // 1000,
            )


if __name__ == "__main__":
    main()
