"""Calibration: the cost of collecting a tensor, and of finding a range in a 2048-bin histogram.

``collect`` is compared with:

* two limits: ``clone`` (reads and writes the tensor once) and ``read`` (torch.aminmax, reads it
  once);
* the plain way (abs, max, torch.histc, adding float counts);
* NVIDIA ModelOpt, if it is installed.

The cost of ``clone`` depends on whether the allocator returns memory that was touched before. In
a fresh process it usually was not, in this loop it was. ``MALLOC_MMAP_THRESHOLD_=131072`` in the
environment makes every large allocation fresh.

``range of a tensor`` is what a weight computes in every training step; it is compared with
reading the tensor.

``estimate`` is compared with the textbook loops, which try one candidate edge at a time with
torch operations, and with ModelOpt.

On one thread the clock is CPU time, which other processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.calib import HistogramCalibrator, MaxCalibrator
from torchq.formats import PerAxis, PerBlock, PerTensor
from torchq.functional import reduce_amax

BINS = 2048
LEVELS = 128


def histc_collect(bins: int = BINS) -> Callable[[Tensor], None]:
    """Histogram of a plain implementation.

    The range comes from the first batch; a wider range adds bins of equal width.
    """
    state: dict[str, Any] = {"counts": None, "width": 0.0}

    def collect(x: Tensor) -> None:
        magnitude = x.abs()
        top = magnitude.max().item()
        if state["counts"] is None:
            state["width"], state["counts"] = top / bins, torch.zeros(bins)
        count = max(len(state["counts"]), int(top / state["width"]) + 1)
        counts = torch.histc(magnitude, bins=count, min=0, max=count * state["width"])
        counts[: len(state["counts"])] += state["counts"]
        state["counts"] = counts

    return collect


def loop_entropy(counts: Tensor) -> int:
    """Run the TensorRT search with a Python loop over edges; each is vectorised over bins."""
    counts = torch.cat([counts[1:2], counts[1:]]).double()
    end = int(counts.nonzero().max()) + 1
    best, least = end, float("inf")
    for edge in range(LEVELS, end + 1):
        inside = counts[:edge]
        reference = inside.clone()
        reference[-1] += counts[edge:].sum()
        run = torch.arange(edge) * LEVELS // edge
        total = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, run, inside)
        occupied = torch.zeros(LEVELS, dtype=torch.float64).index_add_(
            0, run, (inside > 0).double()
        )
        quantized = (total / occupied.clamp(min=1))[run] * (inside > 0)
        p, q = reference / reference.sum(), quantized / quantized.sum()
        divergence = torch.where(p > 0, p * torch.log(p / q), 0.0).sum().item()
        if divergence <= least + 1e-12:
            best, least = edge, min(least, divergence)
    return best


def loop_mse(counts: Tensor) -> int:
    """Find the least squared error of int8 with a Python loop over edges."""
    counts = counts.double()
    centers = torch.arange(len(counts)) + 0.5
    end = int(counts.nonzero().max()) + 1
    errors = []
    for edge in range(1, end + 1):
        step = edge / (LEVELS - 1)
        error = (centers / step).round().clamp(max=LEVELS - 1) * step - centers
        errors.append((counts * error * error).sum().item())
    return 1 + min(range(end), key=lambda i: (errors[i], -i))


def modelopt() -> Any | None:
    """Return ModelOpt's calibrators, or None if it is not installed."""
    try:
        return import_module("modelopt.torch.quantization.calib")
    except ImportError:
        return None


def collecting(
    report: Reporter, x: Tensor, peer: Any | None, times: dict[str, Any], **case: object
) -> None:
    ours, channels, largest = (
        HistogramCalibrator(num_bins=BINS),
        HistogramCalibrator(axis=1, num_bins=BINS),
        MaxCalibrator(),
    )
    plain = histc_collect()
    destination = torch.empty_like(x)
    candidates: dict[str, Callable[[], object]] = {
        "clone": x.clone,
        "copy_ into existing memory": lambda: destination.copy_(x),
        "read (aminmax)": lambda: torch.aminmax(x),
        "torchq max": lambda: largest.collect(x),
        "torchq histogram": lambda: ours.collect(x),
        "torchq histogram per channel": lambda: channels.collect(x),
        "abs, max, histc": lambda: plain(x),
    }
    if peer is not None:
        theirs = peer.HistogramCalibrator(num_bits=8, axis=None, unsigned=False, num_bins=BINS)
        candidates["ModelOpt histogram"] = lambda: theirs.collect(x)
    for row in compare(candidates, baseline="clone", **times):
        report.timing(
            row,
            what="collect",
            elements=x.numel(),
            dtype=str(x.dtype).removeprefix("torch."),
            **case,
        )
    collected = ours.batches * x.numel()
    if (
        int(ours.histogram().counts.sum()) != collected
        or int(channels.histogram().counts.sum()) != channels.batches * x.numel()
    ):
        raise RuntimeError(f"collect: lost counts; expected {collected}")


def ranging(report: Reporter, x: Tensor, times: dict[str, Any]) -> None:
    """Measure the range of a whole tensor.

    Weights take it in every training step, activations with dynamic ranges in every call.
    """
    rows = x.flatten()[: x.numel() // 3200 * 3200].view(-1, 3200)
    cases = {
        "per tensor": PerTensor(),
        "rows": PerAxis((0,)),
        "columns": PerAxis((1,)),
        "blocks of 32": PerBlock(32),
    }
    candidates: dict[str, Callable[[], object]] = {"read (aminmax)": lambda: torch.aminmax(rows)}
    for name, granularity in cases.items():
        candidates[f"torchq {name}"] = lambda granularity=granularity: reduce_amax(
            rows, granularity
        )
        candidates[f"vector_norm {name}"] = lambda granularity=granularity: granularity.amax(rows)
        if not torch.equal(reduce_amax(rows, granularity), granularity.amax(rows).float()):
            raise RuntimeError(f"range {name}: differs from the definition")
    for row in compare(candidates, baseline="read (aminmax)", **times):
        report.timing(
            row,
            what="range of a tensor",
            elements=rows.numel(),
            dtype=str(x.dtype).removeprefix("torch."),
        )


def estimating(report: Reporter, x: Tensor, peer: Any | None, times: dict[str, Any]) -> None:
    ours = HistogramCalibrator(num_bins=BINS)
    ours.collect(x)
    histogram = ours.histogram()
    counts, width = histogram.counts[0], histogram.width.item()
    loops = {"entropy": loop_entropy, "mse": loop_mse}
    theirs = None
    if peer is not None:
        theirs = peer.HistogramCalibrator(num_bits=8, axis=None, unsigned=False, num_bins=BINS)
        theirs.collect(x)
    for method in ("percentile", "mse", "entropy"):
        found = ours.compute_amax(method).item()
        figures: dict[str, object] = {"what": "range", "method": method, "torchq": found}
        candidates: dict[str, Callable[[], object]] = {
            "torchq": lambda method=method: ours.compute_amax(method)
        }
        if method in loops:
            loop = loops[method]
            candidates["loop over edges"] = lambda loop=loop: loop(counts)
            if abs(loop(counts) * width - found) > width:
                raise RuntimeError(
                    f"{method}: got {found}; expected {loop(counts) * width} within one bin"
                )
            report.value(**figures, loop=loop(counts) * width, bin_width=width)
        # ModelOpt's mse needs CUDA.
        if theirs is not None and (method != "mse" or torch.cuda.is_available()):
            options = {"percentile": 99.99} if method == "percentile" else {}
            candidates["ModelOpt"] = lambda method=method, options=options: theirs.compute_amax(
                method, **options
            )
            report.value(**figures, modelopt=float(theirs.compute_amax(method, **options)))
        for row in compare(candidates, baseline="torchq", **times):
            report.timing(row, what="estimate", method=method, bins=BINS)


def estimating_channels(report: Reporter, channels: int, times: dict[str, Any]) -> None:
    ours = HistogramCalibrator(axis=1, num_bins=BINS)
    ours.collect(torch.randn(200, channels, generator=torch.Generator().manual_seed(0)))
    candidates = {
        method: lambda method=method: ours.compute_amax(method)
        for method in ("max", "percentile", "mse", "entropy")
    }
    for row in compare(candidates, baseline="max", **times):
        report.timing(row, what="estimate", channels=channels, bins=BINS)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of this benchmark."""
    options = parser(__doc__)
    options.add_argument(
        "--elements", type=int, default=6_400_000, help="size of the tensor (default: %(default)s)"
    )
    options.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "float16", "bfloat16"],
        help="its dtype (default: %(default)s)",
    )
    options.add_argument(
        "--relu", action="store_true", help="clip negative values to zero, as after a ReLU"
    )
    options.add_argument(
        "--channels",
        type=int,
        default=64,
        help="channels of the per-channel case (default: %(default)s)",
    )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(arguments(), argv)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        given.elements // given.channels // 100, given.channels, 100, generator=generator
    )
    x = (x.relu() if given.relu else x).to(getattr(torch, given.dtype))
    peer = modelopt()
    with Reporter("calibration", given.out, packages=("nvidia-modelopt",)) as report:
        if peer is None:
            report.value(what="left out", candidate="ModelOpt", reason="not installed")
        fresh = "MALLOC_MMAP_THRESHOLD_" in os.environ
        times = {
            **timing(given),
            "clock": time.thread_time if given.threads == 1 else time.perf_counter,
        }
        collecting(
            report, x, peer, times, data="relu" if given.relu else "normal", fresh_memory=fresh
        )
        ranging(report, x, times)
        estimating(report, x.float(), peer, times)
        estimating_channels(report, 512, times)


if __name__ == "__main__":
    main()
