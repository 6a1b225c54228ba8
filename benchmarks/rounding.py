"""How many steps does adaround_ want, and what does it gain over the rounding that it starts from?

Two networks of benchmarks/accuracy.py with depthwise convolutions, the detector of scenes and the
MobileNet of CIFAR-10, get weights of 4 bits, inputs of 8 bits, and first and last layers of 8. A
draw chooses the images that they are calibrated on. Each method starts from the same ranges.

A cell holds the ratio of signal to noise of the outputs in dB, the figures of
benchmarks/accuracy.py, and the processor time of the call. With ``--out`` a run goes on after the
cells that the file has already.

Example:
    python -m benchmarks.rounding --data DIR --cache DIR --out benchmarks/results/rounding.jsonl
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks import figures
from benchmarks.accuracy import NETWORKS, Network
from benchmarks.cifar import some_batches
from benchmarks.harness import Reporter, decibels, finished_rows, parse, parser
from torchq.ptq import adaround_, gptq_
from torchq.recipes import integer

Method = Callable[[nn.Module, list[Tensor]], object]

_KEY = ("network", "method", "draw")
_BATCH = 32
_DEPTHWISE = ("detector", "mobilenet")

#: What is called on a model whose ranges are known.
METHODS: dict[str, Method] = {
    "gptq_": partial(gptq_, progress=False),
    "adaround_, 250 steps": partial(adaround_, steps=250, progress=False),
    "adaround_, 500 steps": partial(adaround_, steps=500, progress=False),
    "adaround_, 1,000 steps": partial(adaround_, steps=1000, progress=False),
}


def with_ranges(network: Network, batches: list[Tensor]) -> nn.Module:
    """Return a quantized copy that is calibrated without corrections."""
    model = copy.deepcopy(network.model)
    config = integer(4, 8, first_last=8)
    torchq.quantize_(model, config, example=batches[0][:1], progress=False)
    torchq.calibrate(model, batches, correct=False, progress=False)
    return model


def measure(
    network: Network, start: nn.Module, batches: list[Tensor], method: str
) -> dict[str, float]:
    """Return the figures of a cell."""
    model = copy.deepcopy(start)
    processor = time.process_time()
    METHODS[method](model, batches)
    seconds = round(time.process_time() - processor, 1)
    outputs = network.outputs(model)
    signal = decibels(torch.cat(outputs), torch.cat(network.expected))
    return {
        **network.compare(network.expected, outputs),
        "decibels": signal,
        "seconds": seconds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cells that are missing, and print the table."""
    described = parser(__doc__)
    described.add_argument(
        "--data", type=Path, required=True, help="folder of CIFAR-10"
    )
    described.add_argument("--cache", type=Path, default=Path(), help="trained weights")
    described.add_argument("--images", type=int, default=2500, help="scenes: a fifth")
    described.add_argument("--calibration", type=int, default=256, help="images")
    described.add_argument("--draws", type=int, nargs="+", default=[0, 1])
    described.add_argument("--networks", nargs="*", default=list(_DEPTHWISE))
    described.add_argument("--methods", nargs="*", default=list(METHODS))
    options = parse(described, argv)
    done = finished_rows(options.out, *_KEY)
    with Reporter("rounding", options.out) as report:
        for name in options.networks:
            network = NETWORKS[name](name, options)
            for draw in options.draws:
                report_draw(report, name, network, draw, options, done)
    if options.out is not None:
        print(figures.rounding(figures.read_file(options.out)))


def report_draw(
    report: Reporter,
    name: str,
    network: Network,
    draw: int,
    options: argparse.Namespace,
    done: set[tuple[Any, ...]],
) -> None:
    """Report the methods of a draw that are missing."""
    missing = [m for m in options.methods if (name, m, draw) not in done]
    if not missing:
        return
    batches = some_batches(network.pool, options.calibration, draw, _BATCH)
    start = with_ranges(network, batches)
    sizes = {"images": len(network.test), "calibration": options.calibration}
    for method in missing:
        case = dict(zip(_KEY, (name, method, draw), strict=True))
        report.value(**case, **sizes, **measure(network, start, batches, method))


if __name__ == "__main__":
    main()
