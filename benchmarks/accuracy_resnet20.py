"""Accuracy of a CIFAR ResNet-20 under every recipe and method, and after a short W4A4 QAT.

Read each row against the FP32 row of the same run. Calibration and training never see the test
images.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, arguments, logits, read_both, resnet20, train
from benchmarks.harness import Reporter, parse

__all__ = ["main"]

_METHODS = ("max", "percentile", "mse", "entropy")
# Recipe -> the calibration methods to try; formats with ranges from each call have none.
_CASES = {
    "int8": _METHODS,
    "int8_per_tensor": _METHODS,
    "fp8": ("max",),
    "int4_weight": ("max",),
    "w4a4": ("mse",),
}
_DYNAMIC = ("mxfp8", "nvfp4")


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = parse(arguments(__doc__, "resnet20.pt", train=5000), argv)
    test, data, calibration = read_both(options)
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
            # The network is fused, so the learning rate is small: ten times as much diverges in
            # float as well.
            trained = train(
                _quantized(model, "w4a4", calibration, "mse"), data, options.steps, lr=5e-4
            )
            row("w4a4 after QAT", trained, calibration="mse", steps=options.steps)


def _quantized(
    model: nn.Module, recipe: str, calibration: list[Tensor] | None, method: str | None
) -> nn.Module:
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, torchq.recipes.by_name(recipe))
    if calibration is not None:
        torchq.calibrate(quantized, calibration, method=method, progress=False)
    return quantized


def _compare(found: Tensor, expected: Tensor, data: Images) -> dict[str, float]:
    noise = (found - expected).square().sum()
    sqnr = float("inf") if not noise else (10 * torch.log10(expected.square().sum() / noise)).item()
    same = (found.argmax(1) == expected.argmax(1)).float().mean().item()
    return {
        "accuracy": round(accuracy(found, data), 4),
        "same_class": round(same, 4),
        "sqnr_db": round(sqnr, 1),
    }


if __name__ == "__main__":
    main()
