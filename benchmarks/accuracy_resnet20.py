"""Accuracy of a trained CIFAR ResNet-20 under every recipe and calibration method, and after a short W4A4 QAT.

The floor to read each row against is the FP32 row of the same run. Test images are kept out of calibration and training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20
from benchmarks.harness import Reporter, parse, parser

__all__ = ["main"]

_METHODS = ("max", "percentile", "mse", "entropy")
# Recipe -> the calibration methods to try; formats with ranges from each call have none.
_CASES = {"int8": _METHODS, "int8_per_tensor": _METHODS, "fp8": ("max",), "int4_weight": ("max",), "w4a4": ("mse",)}
_DYNAMIC = ("mxfp8", "nvfp4")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with resnet20.pt and the tars of images")
    options.add_argument("--images", type=int, default=2000, help="test images (default: %(default)s)")
    options.add_argument("--calibration", type=int, default=512, help="training images to calibrate on (default: %(default)s)")
    options.add_argument("--train", type=int, default=5000, help="training images for QAT (default: %(default)s)")
    options.add_argument("--steps", type=int, default=200, help="QAT steps of 64 images; 0 leaves QAT out (default: %(default)s)")
    return parse(options, argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = _arguments(argv)
    test = read_split(options.data, "test", 50 if options.quick else options.images)
    data = read_split(options.data, "train", 64 if options.quick else max(options.calibration, options.train))
    calibration = data.batches(64)[: max(1, options.calibration // 64)]
    model = resnet20(options.data)
    example = test.images[:4]
    torchq.fuse_(model, example)
    expected = logits(model, test)
    with Reporter("accuracy_resnet20", options.out) as report:

        def row(name: str, quantized: nn.Module, **case: object) -> None:
            report.value(case=name, **case, **_compare(logits(quantized, test), expected, test))

        row("fp32", model)
        for recipe, methods in _CASES.items():
            for method in methods:
                row(recipe, _quantized(model, recipe, calibration, method), calibration=method)
        for recipe in _DYNAMIC:
            row(recipe, _quantized(model, recipe, None, None), calibration="each call")
        if options.steps:
            steps = 1 if options.quick else options.steps
            row("w4a4 after QAT", _trained(_quantized(model, "w4a4", calibration, "mse"), data, steps), calibration="mse", steps=steps)


def _quantized(model: nn.Module, recipe: str, calibration: list[Tensor] | None, method: str | None) -> nn.Module:
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, torchq.recipes.by_name(recipe))
    if calibration is not None:
        torchq.calibrate(quantized, calibration, method=method, progress=False)
    return quantized


def _compare(found: Tensor, expected: Tensor, data: Images) -> dict[str, float]:
    noise = (found - expected).square().sum()
    sqnr = float("inf") if not noise else (10 * torch.log10(expected.square().sum() / noise)).item()
    same = (found.argmax(1) == expected.argmax(1)).float().mean().item()
    return {"accuracy": round(accuracy(found, data), 4), "same_class": round(same, 4), "sqnr_db": round(sqnr, 1)}


def _trained(model: nn.Module, data: Images, steps: int) -> nn.Module:
    """A short QAT. The network is fused, so the learning rate is small: in float, ten times as much diverges as well."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(torchq.qat.param_groups(model, lr=5e-4, weight_decay=1e-4), momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        index = torch.randint(len(data.labels), (64,), generator=generator)
        images, labels = data.augmented(index, generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


if __name__ == "__main__":
    main()
