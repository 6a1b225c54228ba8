"""Accuracy of a CIFAR ResNet-20 with 2 to 4 bits: what each choice of the recipe is worth.

Nothing is trained. Read each row against the FP32 row of the same run. Calibration never sees the
test images.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

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
    "weights by max": {"unsigned": False, "first_last": 8},
    "unsigned activations": {"first_last": 8},
}
_INPUT_METHODS = ("max", "percentile", "mse", "entropy", "lp")


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = parse(arguments(__doc__, "resnet20.pt", train=0), argv)
    test, _, calibration = read_both(options)
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    with Reporter("accuracy_few_bits", options.out) as report:

        def row(
            case: str, config: QuantConfig | None, correct: str | None = None, **calibrate: object
        ) -> None:
            quantized = copy.deepcopy(model)
            if config is not None:
                torchq.quantize_(quantized, config)
                torchq.calibrate(quantized, calibration, progress=False, **calibrate)
            if correct is not None:
                torchq.ptq.correct_bias_(quantized, calibration, method=correct, progress=False)
            found = round(accuracy(logits(quantized, test), test), 4)
            name = None if config is None else config.name
            report.value(case=case, recipe=name, bias=correct, **calibrate, accuracy=found)

        row("fp32", None)
        for case, choices in _CHOICES.items():
            row(case, integer(4, 4, **choices))
        for bits in (4, 2):
            for method in _INPUT_METHODS:
                row("activations", integer(4, bits, first_last=8), method=method)
            row("activations", integer(4, bits, first_last=8), method="lp", power=3.0)
        for widths in ((4, 8), (4, 4), (3, 4), (2, 4)):
            for method in ("max", "mse"):
                config = integer(*widths, first_last=8, weight_method=method)
                for correct in (None, "empirical", "analytic"):
                    row(f"weights by {method}", config, correct)


if __name__ == "__main__":
    main()
