"""Perplexity of a small language model with few bits after each algorithm of torchq.ptq.

The model is trained here, on the CPU, on Python's own standard library (every tenth module is kept
for the test), and its weights are kept in ``--work``. Figures are perplexities per byte. A seed
chooses the pieces of training text that an algorithm sees. As usual the head stays float. Inputs
have one fixed range per tensor, found by "mse" with 4 bits and by "max" with 8. With ``--out`` a
run goes on after the rows that the file has already.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.language_model import LENGTH, calibration_pieces, perplexity, trained_language_model

__all__ = ["main"]

Algorithm = Callable[[nn.Module, list[Tensor]], object]


def _nothing(model: nn.Module, batches: list[Tensor]) -> None:
    """Leave the model as it is."""


def _smooth(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.smooth_(model, batches, progress=False)


def _awq(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.awq_(model, batches, progress=False)


def _gptq(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.gptq_(model, batches, progress=False)


def _published_gptq(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.gptq_(model, batches, target="weight", refine=False, progress=False)


# Name -> what runs before calibrate, and after it.
_ALGORITHMS: dict[str, tuple[Algorithm, Algorithm]] = {
    "nearest": (_nothing, _nothing),
    "smooth_": (_smooth, _nothing),
    "awq_": (_awq, _nothing),
    "GPTQ as published": (_nothing, _published_gptq),
    "gptq_": (_nothing, _gptq),
}
_CASES = [
    *(("W4 group 128", name) for name in ("nearest", "awq_", "GPTQ as published", "gptq_")),
    *(("W8A8", name) for name in ("nearest", "smooth_")),
    *(("W4A8", name) for name in ("nearest", "smooth_", "awq_")),
    *(("W4A4", name) for name in ("nearest", "smooth_", "gptq_")),
]


def _recipe(widths: str) -> torchq.QuantConfig:
    """Return the recipe of a name such as ``W4A8`` or ``W4 group 128``."""
    if widths == "W4 group 128":
        return torchq.recipes.int4_weight()
    weight, input = (int(part) for part in widths[1:].split("A"))
    return torchq.recipes.integer(weight, input)


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, required=True, help="folder for the weights")
    options.add_argument("--steps", type=int, default=800, help="of training, if there are none")
    options.add_argument("--pieces", type=int, default=200, help="of 128 bytes, of the test text")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each width, algorithm and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.steps, options.pieces, options.seeds = 2, 4, options.seeds[:1]
    done = finished_rows(options.out, "widths", "algorithm", "seed")
    model, text = trained_language_model(options.work, options.steps)
    test = text.test_pieces(options.pieces, LENGTH)
    with Reporter("accuracy_language_model", options.out) as report:
        common = {"training_steps": options.steps, "bytes": test[:, 1:].numel()}
        if ("FP32", None, None) not in done:
            report.value(
                **common,
                widths="FP32",
                algorithm=None,
                seed=None,
                perplexity=perplexity(model, test),
            )
        for seed in options.seeds:
            batches = calibration_pieces(text, seed, 2 if options.quick else 6)
            for widths, name in _CASES:
                if (widths, name, seed) not in done:
                    found = _measure(model, widths, name, batches, test)
                    report.value(**common, widths=widths, algorithm=name, seed=seed, **found)


def _measure(
    model: nn.Module, widths: str, name: str, batches: list[Tensor], test: Tensor
) -> dict[str, Any]:
    """Return the perplexity, and the seconds of process time of the algorithm."""
    before, after = _ALGORITHMS[name]
    quantized = copy.deepcopy(model)
    start = time.process_time()
    torchq.quantize_(quantized, _recipe(widths), exclude=["lm_head"])
    before(quantized, batches)
    torchq.calibrate(quantized, batches, progress=False)
    after(quantized, batches)
    seconds = round(time.process_time() - start, 1)
    return {"perplexity": round(perplexity(quantized, test), 4), "process_seconds": seconds}


if __name__ == "__main__":
    main()
