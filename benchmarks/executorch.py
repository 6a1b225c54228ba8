"""Compare INT8 with float32 in ExecuTorch, on four networks: speed, size, accuracy and codes.

A ResNet-20, a MobileNet and a small vision transformer for CIFAR-10, and a detector, as
benchmarks/accuracy.py has them: what is not given is trained once. Both files of a network are
lowered for XNNPACK and take one image. ``file`` and ``simulation`` hold how the file, and the model
in PyTorch that it was made from, differ from the float network; ``beside`` and ``decibels`` compare
the file with that model. Times are seconds of the processor, in all threads of the process.

Example:
    python -m benchmarks.executorch --data DIR --cache DIR --out benchmarks/results/executorch.jsonl
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
from torch import Tensor

import torchq
from benchmarks.accuracy import NETWORKS, Network, classifier
from benchmarks.cifar import some_batches
from benchmarks.harness import Reporter, compare, decibels, parse, parser, timing
from torchq.runtimes import ExecuTorch

_NETWORKS = ("resnet20", "mobilenet", "detector", "transformer")
_CALIBRATION = 512


def _one_by_one(file: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([file(image) for image in x.split(1)])


def _report(
    name: str, network: Network, options: argparse.Namespace, reporter: Reporter
) -> None:
    image = network.test[:1]
    model = copy.deepcopy(network.model)
    torchq.quantize_(model, target="executorch", example=image, progress=False)
    batches = some_batches(network.pool, 64 if options.quick else _CALIBRATION, 0)
    torchq.calibrate(model, batches, progress=False)
    expected = {"int8": network.outputs(model), "float32": network.expected}
    settings = {"int8": ExecuTorch(), "float32": ExecuTorch(quantized=False)}
    files: dict[str, Any] = {
        n: torchq.deploy(model, image, target=s, progress=False)
        for n, s in settings.items()
    }
    calls = {kind: partial(file, image) for kind, file in files.items()}
    how = {**timing(options), "clock": time.process_time}
    for row in compare(calls, baseline="float32", **how):
        file = files[row.candidate]
        simulated = expected[row.candidate]
        results = network.outputs(partial(_one_by_one, file))
        reporter.timing(
            row,
            network=name,
            images=len(network.test),
            integer=len(file.report.integer),
            in_float=dict(file.report.in_float),
            outside=sum(file.report.outside.values()),
            file=network.compare(network.expected, results),
            simulation=network.compare(network.expected, simulated),
            beside=network.compare(simulated, results),
            decibels=decibels(torch.cat(results), torch.cat(simulated)),
            kilobytes=file.graph.numel() // 1000,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each file."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--data", type=Path, required=True, help="of the images and weights"
    )
    arguments.add_argument(
        "--cache", type=Path, default=Path(), help="folder of trained weights"
    )
    arguments.add_argument(
        "--images", type=int, default=10_000, help="to test; scenes: a fifth"
    )
    arguments.add_argument(
        "--networks", nargs="+", default=_NETWORKS, choices=_NETWORKS
    )
    options = parse(arguments, argv)
    with (
        Reporter("executorch", options.out, ["executorch"]) as reporter,
        torch.no_grad(),
    ):
        for name in options.networks:
            _report(
                name, NETWORKS.get(name, classifier)(name, options), options, reporter
            )


if __name__ == "__main__":
    main()
