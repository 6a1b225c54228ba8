"""Which calibration method suits which kind of network.

Inputs are calibrated by each method on the same training data, with the weights of the recipe; no
algorithm follows. Networks of images have their first and last layer in 8 bits, and a row holds
their accuracy; the head of the language model stays float, and a row holds its perplexity.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.accuracy_ptq import NETWORKS
from benchmarks.cifar import accuracy, logits, read_split, some_batches
from benchmarks.harness import Reporter, parse, parser
from benchmarks.language_model import LENGTH, perplexity, trained_language_model

__all__ = ["main"]

_METHODS = ("max", "percentile", "mse", "entropy", "lp", "auto")
_WIDTHS = ((8, 8), (4, 8), (4, 4))


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with tars and weights")
    options.add_argument("--work", type=Path, help="folder with the language model; without: none")
    options.add_argument("--images", type=int, default=2000, help="test images")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each network, width, method and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.images, options.seeds = 50, options.seeds[:1]
    test = read_split(options.data, "test", options.images)
    pool = read_split(options.data, "train", 1024).images
    with Reporter("accuracy_calibration", options.out) as report:
        for network in options.networks:
            model = NETWORKS[network](options.data)
            torchq.fuse_(model, test.images[:4])

            def measure(candidate: nn.Module) -> dict[str, float]:
                return {"accuracy": round(accuracy(logits(candidate, test), test), 4)}

            for seed in options.seeds:
                batches = some_batches(pool, 256, seed)
                case = {"network": network, "seed": seed}
                _report(report, case, model, batches, measure, {"first_last": 8}, [])
        if options.work is not None:
            _language_model(report, options)


def _language_model(report: Reporter, options: argparse.Namespace) -> None:
    """Report the rows of the language model."""
    model, text = trained_language_model(options.work, 800)
    test = text.test_pieces(4 if options.quick else 200, LENGTH)

    def measure(candidate: nn.Module) -> dict[str, float]:
        return {"perplexity": round(perplexity(candidate, test), 4)}

    for seed in options.seeds:
        generator = torch.Generator().manual_seed(seed)
        batches = [text.batch(generator, size=16, length=LENGTH)[:, :-1] for _ in range(4)]
        case = {"network": "language model", "seed": seed}
        _report(report, case, model, batches, measure, {}, ["lm_head"])


def _report(
    report: Reporter,
    case: dict[str, Any],
    model: nn.Module,
    batches: list[Tensor],
    measure: Callable[[nn.Module], dict[str, float]],
    options: dict[str, Any],
    exclude: list[str],
) -> None:
    """Report one network with one seed, in float and with each width and method."""
    report.value(**case, widths="FP32", method=None, **measure(model))
    for weight, input in _WIDTHS:
        for method in _METHODS:
            quantized = copy.deepcopy(model)
            recipe = torchq.recipes.integer(weight, input, **options)
            torchq.quantize_(quantized, recipe, exclude=exclude)
            torchq.calibrate(quantized, batches, method=method, progress=False)
            row = {**case, "widths": f"W{weight}A{input}", "method": method}
            report.value(**row, **measure(quantized))


if __name__ == "__main__":
    main()
