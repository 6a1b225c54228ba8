"""Accuracy of trained convolutional networks after what torchq.ptq does before calibration.

Channels are scaled by smooth_, awq_ or equalize_, or biases are absorbed as well; then ranges are
calibrated, and nothing else. Nothing sees a label before the accuracy is measured. A seed chooses
the training images. With ``--out`` a run goes on after the rows that the file has already.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from torch import Tensor, nn

import torchq
from benchmarks.accuracy_ptq import NETWORKS
from benchmarks.cifar import accuracy, logits, read_split, some_batches
from benchmarks.harness import Reporter, finished_rows, parse, parser

__all__ = ["main"]

_WIDTHS = ((4, 8), (4, 4))
_COUNT = 512


def _nothing(model: nn.Module, batches: list[Tensor]) -> None:
    """Leave the model as it is."""


def _smooth(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.smooth_(model, batches, progress=False)


def _awq(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.awq_(model, batches, progress=False)


def _equalize(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.equalize_(model, batches[0])


def _absorb(model: nn.Module, batches: list[Tensor]) -> None:
    torchq.ptq.equalize_(model, batches[0], absorb_biases=True)


# Name -> what runs between quantize_ and calibrate.
_ALGORITHMS: dict[str, Callable[[nn.Module, list[Tensor]], None]] = {
    "calibrate": _nothing,
    "smooth_": _smooth,
    "awq_": _awq,
    "equalize_": _equalize,
    "equalize_(absorb_biases=True)": _absorb,
}


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with tars and weights")
    options.add_argument("--images", type=int, default=4000, help="test images")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options.add_argument("--networks", nargs="+", default=["resnet20"], choices=NETWORKS)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each network, width, algorithm and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.images, options.seeds = 50, options.seeds[:1]
    test = read_split(options.data, "test", options.images)
    pool = read_split(options.data, "train", 128 if options.quick else 4096).images
    done = finished_rows(options.out, "network", "widths", "algorithm", "seed")
    with Reporter("accuracy_before_calibration", options.out) as report:
        for network in options.networks:
            model = NETWORKS[network](options.data)
            torchq.fuse_(model, test.images[:4])
            row = {"network": network, "images": options.images}
            if (network, "FP32", None, None) not in done:
                found = round(accuracy(logits(model, test), test), 4)
                report.value(**row, widths="FP32", algorithm=None, seed=None, accuracy=found)
            for seed, widths, name in product(options.seeds, _WIDTHS, _ALGORITHMS):
                key = {"widths": f"W{widths[0]}A{widths[1]}", "algorithm": name, "seed": seed}
                if (network, *key.values()) in done:
                    continue
                batches = some_batches(pool, _COUNT, seed)
                quantized, seconds = _quantized(model, batches, widths, name)
                found = round(accuracy(logits(quantized, test), test), 4)
                report.value(**row, **key, accuracy=found, process_seconds=seconds)


def _quantized(
    model: nn.Module, batches: list[Tensor], widths: tuple[int, int], name: str
) -> tuple[nn.Module, float]:
    """Return the quantized model, and the seconds of process time that it took."""
    quantized, start = copy.deepcopy(model), time.process_time()
    torchq.quantize_(quantized, torchq.recipes.integer(*widths, first_last=8))
    _ALGORITHMS[name](quantized, batches)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized, round(time.process_time() - start, 1)


if __name__ == "__main__":
    main()
