"""Accuracy of a CIFAR ResNet-20 with 2 to 4 bits: what each choice of the recipe is worth.

Nothing is trained. Read each row against the FP32 row. Calibration never sees the test images. With
``--out`` a run goes on after the rows that the file has already.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchq
from benchmarks.cifar import accuracy, arguments, logits, read_both, resnet20
from benchmarks.harness import Reporter, parse
from torchq import QuantConfig
from torchq.recipes import integer

__all__ = ["main"]

# The four choices one after the other; the last row is recipes.w4a4().
_CHOICES = {
    "all layers, mse weights, signed": {"weight_method": "mse", "unsigned": False},
    "first and last layer 8 bits": {"weight_method": "mse", "unsigned": False, "first_last": 8},
    "weights by the error of the output": {"unsigned": False, "first_last": 8},
    "unsigned activations": {"first_last": 8},
}
_INPUT_METHODS = ("max", "percentile", "mse", "entropy", "lp")
# "activation" is the error of the output.
_WEIGHT_METHODS = ("max", "mse", "activation")


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = parse(arguments(__doc__, "resnet20.pt", train=0), argv)
    test, _, calibration = read_both(options)
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    done = _finished(options.out)
    with Reporter("accuracy_few_bits", options.out) as report:

        def row(
            case: str, config: QuantConfig | None, correct: str | None = None, **calibrate: object
        ) -> None:
            name = None if config is None else config.name
            key = {"case": case, "recipe": name, "bias": correct, **calibrate}
            if key in done:
                return
            quantized = copy.deepcopy(model)
            if config is not None:
                torchq.quantize_(quantized, config)
                torchq.calibrate(quantized, calibration, progress=False, **calibrate)
            if correct is not None:
                torchq.ptq.correct_bias_(quantized, calibration, method=correct, progress=False)
            found = round(accuracy(logits(quantized, test), test), 4)
            report.value(**key, accuracy=found)

        row("fp32", None)
        for case, choices in _CHOICES.items():
            row(case, integer(4, 4, **choices))
        for bits in (4, 2):
            for method in _INPUT_METHODS:
                row("activations", integer(4, bits, first_last=8), method=method)
            row("activations", integer(4, bits, first_last=8), method="lp", power=3.0)
        for widths in ((4, 8), (4, 4), (3, 4), (2, 4)):
            for method in _WEIGHT_METHODS:
                config = integer(*widths, first_last=8, weight_method=method)
                for correct in (None, "empirical", "analytic"):
                    row(f"weights by {method}", config, correct)


def _finished(path: Path | None) -> list[dict[str, Any]]:
    """Return what tells the rows apart that a file of results has already."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    own = ("kind", "bench", "accuracy")
    results = (row for row in rows if row["kind"] == "result")
    return [{name: row[name] for name in row if name not in own} for row in results]


if __name__ == "__main__":
    main()
