"""The cost of ``import torchq`` over ``import torch``, and of ``quantize_`` for a ResNet-50.

Imports are timed in fresh interpreters, alternating, by CPU time (user and system) of the child.
The figure is the difference of the medians. The first round is not counted: after it, the files are
in the cache of the operating system.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torchvision

import torchq
from benchmarks.harness import Reporter, parse, parser

IMPORT_LIMIT_S = 0.15
SWAP_LIMIT_S = 0.05


def child_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(parser(__doc__), argv)
    with Reporter("import_and_swap", options.out) as report:
        seconds: dict[str, list[float]] = {"import torch": [], "import torch, torchq": []}
        for number in range(options.rounds + 1):
            for code, samples in seconds.items():
                value = child_seconds(code)
                if number:
                    samples.append(value)
        bare, full = (statistics.median(samples) for samples in seconds.values())
        report.value(
            what="import torchq over torch",
            median_s=full - bare,
            torch_s=bare,
            limit_s=IMPORT_LIMIT_S,
            rounds=options.rounds,
        )

        times = []
        for number in range(options.rounds + 1):
            model = torchvision.models.resnet50(weights=None)
            value = cpu_seconds(lambda model=model: torchq.quantize_(model))
            if number:
                times.append(value)
        quantizers = sum(isinstance(m, torchq.TensorQuantizer) for m in model.modules())
        report.value(
            what="quantize_ of ResNet-50",
            median_s=statistics.median(times),
            limit_s=SWAP_LIMIT_S,
            quantizers=quantizers,
        )


if __name__ == "__main__":
    main()
