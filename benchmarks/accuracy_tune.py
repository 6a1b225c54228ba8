"""What torchq.tune finds for trained networks, and how long it takes.

The metric is the accuracy in percent on some test images, and the largest drop 0.5. Settings are
tried on 512 training images without labels. Each row has the accuracy of the result on all test
images, the mean bits of its weights, and the seconds of process time with one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20, some_batches
from benchmarks.harness import Reporter, parse, parser

__all__ = ["main"]

_MAX_DROP = 0.5
_COUNT = 512

# Name -> the arguments of torchq.tune beside model, batches, metric and max_drop.
_SEARCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "tune(max_drop=0.5)": dict,
    "tune(max_drop=0.5, fewest_bits=True)": lambda: {"fewest_bits": True},
    "tune(max_drop=0.5, recipe=integer(4, 4))": lambda: {"recipe": torchq.recipes.integer(4, 4)},
}


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with tars and weights")
    options.add_argument("--images", type=int, default=10_000, help="test images")
    options.add_argument("--metric-images", type=int, default=2000, help="of the metric")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--searches", nargs="+", default=list(_SEARCHES), choices=_SEARCHES)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each search and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.images, options.metric_images, options.seeds = 50, 50, options.seeds[:1]
    test = read_split(options.data, "test", options.images)
    pool = read_split(options.data, "train", 4096)
    with Reporter("accuracy_tune", options.out) as report:
        model = resnet20(options.data)
        torchq.fuse_(model, test.images[:4])
        found = round(accuracy(logits(model, test), test), 4)
        report.value(network="resnet20", search=None, seed=None, accuracy=found)
        for seed in options.seeds:
            batches = some_batches(pool.images, _COUNT, seed)
            for name in options.searches:
                row = {"network": "resnet20", "search": name, "seed": seed}
                found = _measure(model, name, batches, test, options.metric_images)
                report.value(**row, images=options.images, **found)


def _measure(
    model: nn.Module, name: str, batches: list[torch.Tensor], test: Images, count: int
) -> dict[str, Any]:
    """Return what one search finds."""
    part = Images(test.images[:count], test.labels[:count])

    def metric(candidate: nn.Module) -> float:
        return 100 * accuracy(logits(candidate, part), part)

    start = time.process_time()
    result = torchq.tune(
        model, batches, metric, max_drop=_MAX_DROP, progress=False, **_SEARCHES[name]()
    )
    seconds = round(time.process_time() - start, 1)
    return {
        "settings": str(result.config),
        "kept": result.kept,
        "trials": [(t.change, round(t.metric, 2), round(t.mean_bits, 3)) for t in result.table],
        "mean_bits": round(result.mean_bits, 3),
        "accuracy": round(accuracy(logits(result.model, test), test), 4),
        "process_seconds": seconds,
    }


if __name__ == "__main__":
    main()
