"""Compare a trained CIFAR ResNet-20, deployed, with its simulation on real images.

Each row holds the accuracy, the share of images with the same class, and the ratio of signal to
error. The last column refers to the simulation in float64: it shows how far float32 alone, on
either side, moves the codes.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20
from benchmarks.deploy_native import db
from benchmarks.harness import Reporter, parse, parser

__all__ = ["main"]

_PLACEMENTS = (None, "tensorrt", "openvino")


def _arguments() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="folder with resnet20.pt and the tars of images"
    )
    options.add_argument(
        "--images", type=int, default=10_000, help="test images (default: %(default)s)"
    )
    options.add_argument(
        "--calibration",
        type=int,
        default=512,
        help="training images to calibrate on (default: %(default)s)",
    )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = parse(_arguments(), argv)
    test = read_split(options.data, "test", 50 if options.quick else options.images)
    batches = read_split(
        options.data, "train", 64 if options.quick else options.calibration
    ).batches(64)
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    with Reporter("accuracy_deploy", options.out) as report:
        expected = logits(model, test)
        report.value(case="fp32", accuracy=accuracy(expected, test), images=len(test.labels))
        for placement in _PLACEMENTS:
            for name, fields in _rows(_quantized(model, placement, batches), test):
                report.value(case=name, placement=placement or "inputs", **fields)


def _quantized(model: nn.Module, placement: str | None, batches: list[Tensor]) -> nn.Module:
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, target=placement, example=batches[0][:1] if placement else None)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


def _rows(simulated: nn.Module, test: Images) -> list[tuple[str, dict[str, float]]]:
    plain = logits(simulated, test)
    exact = logits(copy.deepcopy(simulated).double(), replace(test, images=test.images.double()))
    found = {
        "simulation": plain,
        "int8": logits(torchq.deploy(simulated), test),
        "int8 layers only": logits(torchq.deploy(simulated, fuse=False), test),
    }
    return [(name, _fields(result, plain, exact, test)) for name, result in found.items()]


def _fields(result: Tensor, plain: Tensor, exact: Tensor, test: Images) -> dict[str, float]:
    return {
        "accuracy": accuracy(result, test),
        "same_class": float((result.argmax(1) == plain.argmax(1)).float().mean()),
        "to_simulation_db": round(db(result, plain), 1),
        "to_float64_db": round(db(result, exact), 1),
    }


if __name__ == "__main__":
    main()
