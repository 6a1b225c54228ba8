"""Calibration: the cost of collecting a tensor, and of finding a range in a 2048-bin histogram.

``collect`` is compared with two limits, ``clone`` (reads and writes the tensor once) and ``read``
(torch.aminmax, reads it once), and with NVIDIA ModelOpt, if it is installed. The cost of ``clone``
depends on whether the allocator returns memory that was touched before. In a fresh process it
usually was not, in this loop it was. ``MALLOC_MMAP_THRESHOLD_=131072`` in the environment makes
every large allocation fresh. ``estimate`` is compared with ModelOpt.

On one thread the clock is CPU time, which other processes on the machine disturb less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.calib import Calibrator
from torchq.formats import PerAxis

BINS = 2048


def modelopt() -> Any | None:
    """Return ModelOpt's calibrators, or None if it is not installed."""
    try:
        return import_module("modelopt.torch.quantization.calib")
    except ImportError:
        return None


def collecting(
    report: Reporter, x: Tensor, peer: Any | None, times: dict[str, Any], **case: object
) -> None:
    ours = Calibrator("histogram", num_bins=BINS)
    channels = Calibrator("histogram", granularity=PerAxis((1,)), num_bins=BINS)
    largest = Calibrator()
    destination = torch.empty_like(x)
    candidates: dict[str, Callable[[], object]] = {
        "clone": x.clone,
        "copy_ into existing memory": lambda: destination.copy_(x),
        "read (aminmax)": lambda: torch.aminmax(x),
        "torchq max": lambda: largest.collect(x),
        "torchq histogram": lambda: ours.collect(x),
        "torchq histogram per channel": lambda: channels.collect(x),
    }
    if peer is not None:
        theirs = peer.HistogramCalibrator(
            num_bits=8, axis=None, unsigned=False, num_bins=BINS
        )
        candidates["ModelOpt histogram"] = lambda: theirs.collect(x)
    for row in compare(candidates, baseline="clone", **times):
        report.timing(row, what="collect", elements=x.numel(), dtype="float32", **case)


def estimating(
    report: Reporter, x: Tensor, peer: Any | None, times: dict[str, Any]
) -> None:
    ours = Calibrator("histogram", num_bins=BINS)
    ours.collect(x)
    theirs = None
    if peer is not None:
        theirs = peer.HistogramCalibrator(
            num_bits=8, axis=None, unsigned=False, num_bins=BINS
        )
        theirs.collect(x)
    for method in ("percentile", "mse", "entropy"):
        amax = ours.range(method).high.item()
        figures: dict[str, object] = {"what": "range", "method": method, "torchq": amax}
        candidates: dict[str, Callable[[], object]] = {
            "torchq": lambda method=method: ours.range(method).high
        }
        # ModelOpt's mse needs CUDA.
        if theirs is not None and (method != "mse" or torch.cuda.is_available()):
            options = {"percentile": 99.99} if method == "percentile" else {}
            candidates["ModelOpt"] = lambda method=method, options=options: (
                theirs.compute_amax(method, **options)
            )
            report.value(
                **figures, modelopt=float(theirs.compute_amax(method, **options))
            )
        for row in compare(candidates, baseline="torchq", **times):
            report.timing(row, what="estimate", method=method, bins=BINS)


def estimating_channels(report: Reporter, channels: int, times: dict[str, Any]) -> None:
    ours = Calibrator("histogram", granularity=PerAxis((1,)), num_bins=BINS)
    ours.collect(torch.randn(200, channels, generator=torch.Generator().manual_seed(0)))
    candidates = {
        method: lambda method=method: ours.range(method).high
        for method in ("max", "percentile", "mse", "entropy")
    }
    for row in compare(candidates, baseline="max", **times):
        report.timing(row, what="estimate", channels=channels, bins=BINS)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--elements", type=int, default=6_400_000, help="size of the tensor"
    )
    chosen = parse(options, argv)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(chosen.elements // 64 // 100, 64, 100, generator=generator)
    peer = modelopt()
    with Reporter("calibration", chosen.out, packages=("nvidia-modelopt",)) as report:
        if peer is None:
            report.value(what="left out", candidate="ModelOpt", reason="not installed")
        fresh = "MALLOC_MMAP_THRESHOLD_" in os.environ
        times = {
            **timing(chosen),
            "clock": time.thread_time if chosen.threads == 1 else time.perf_counter,
        }
        collecting(report, x, peer, times, data="normal", fresh_memory=fresh)
        estimating(report, x, peer, times)
        estimating_channels(report, 512, times)


if __name__ == "__main__":
    main()
