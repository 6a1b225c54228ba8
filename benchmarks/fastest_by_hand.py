"""Does ``target="fastest"`` cost anything beside a session that is opened by hand from its file?

For each network: ``torchq.deploy(target="fastest")`` chooses an engine; its file is written, and
every runtime that reads it opens it by hand as its documentation shows, with the number of threads
and nothing else set. All are called in turns on one picture. ``ratio`` is the time of the deployed
module over that of the fastest session, inside each round; its median and its quartiles are stored.

Weights are random: what a file takes does not depend on them.

Example:
    python -m benchmarks.fastest_by_hand --out benchmarks/results/fastest_by_hand.jsonl
    python -m benchmarks.fastest_by_hand --out FILE --table
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torchq
from benchmarks.deploy import DIRECT, FASTEST, build, quantized
from benchmarks.harness import Reporter, compare, finished_rows, parse, parser, timing
from torchq.runtimes import EngineModule
from torchq.utils.text import table

NETWORKS = (
    "mobilenet_v3_small",
    "shufflenet_v2_x1_0",
    "mobilenet_v2",
    "squeezenet1_1",
    "resnet18",
    "encoder",
)
_DEPLOYED = "fastest"
_PACKAGES = ("onnxruntime", "openvino")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a network."""
    model, x = build(name, 1)
    deployed = torchq.deploy(
        quantized(model, x, FASTEST), x, target="fastest", progress=False
    )
    row = {
        "network": name,
        "threads": options.threads,
        "chosen": deployed.report.chosen,
    }  # type: ignore[union-attr]
    if not isinstance(deployed, EngineModule):
        return {**row, "problem": "runs in torch, which reads no file"}
    calls: dict[str, Callable[[], object]] = {_DEPLOYED: partial(deployed, x)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(deployed.graph_bytes())
        for runtime, opened in DIRECT.items():
            calls[runtime] = opened(path, x, options.threads)
    # Of one thread: the processor's time, of which other programs take none.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows = {
        baseline: {
            timed.candidate: timed
            for timed in compare(
                {_DEPLOYED: calls[_DEPLOYED], baseline: calls[baseline]},
                baseline=baseline,
                clock=clock,
                **timing(options),
            )
        }
        for baseline in DIRECT
    }
    best = min(rows, key=lambda baseline: rows[baseline][baseline].median_s)
    mine, by_hand = rows[best][_DEPLOYED], rows[best][best]
    return {
        **row,
        "by_hand": best,
        "fastest_ms": round(1000 * mine.median_s, 4),
        "by_hand_ms": round(1000 * by_hand.median_s, 4),
        "ratio": round(mine.ratio, 4),
        "ratio_low": round(mine.ratio_low, 4),
        "ratio_high": round(mine.ratio_high, 4),
    }


def print_table(path: Path) -> None:
    """Print the rows of a file."""
    lines_of_file = map(json.loads, path.read_text("utf-8").splitlines())
    rows = [row for row in lines_of_file if row["kind"] == "result"]
    lines: list[tuple[str, ...]] = [
        ("network", "chosen", "ms", "best by hand", "ms", "ratio", "quartiles")
    ]
    for row in rows:
        if "problem" in row:
            lines.append((row["network"], row["chosen"], "", row["problem"]))
            continue
        lines.append(
            (
                row["network"],
                row["chosen"],
                f"{row['fastest_ms']:.3g}",
                row["by_hand"],
                f"{row['by_hand_ms']:.3g}",
                f"{row['ratio']:.3f}",
                f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            )
        )
    print(table(lines, "the deployed module over the best session by hand"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, or print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--networks", nargs="+", default=NETWORKS)
    arguments.add_argument(
        "--table", action="store_true", help="print the rows of --out"
    )
    options = parse(arguments, argv)
    if options.table:
        print_table(options.out)
        return
    done = finished_rows(options.out, "network", "threads")
    warnings.simplefilter("ignore")
    reporter = Reporter("fastest_by_hand", options.out, _PACKAGES)
    with reporter as report, torch.no_grad():
        for name in options.networks:
            if (name, options.threads) not in done:
                report.value(**measure(name, options))


if __name__ == "__main__":
    main()
