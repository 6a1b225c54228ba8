"""Sweep torchq over the networks of torchvision, timm, Ultralytics, smp and Hugging Face.

For each network: does ``plan`` leave the model alone; does ``quantize_`` work, and which products
with weights stay float; is the disabled model float bit for bit, at another size and batch and in
train mode; do ``restore_``, ``save`` and ``load``, ``fuse_``, the export to ONNX Runtime and
``deploy`` work and agree. Weights are random and inputs small.

Each network runs in a process of its own with limits of time and memory. Results are appended to a
file as they come, and a second run goes on where the first one ended: it makes the checks that a
network has no result of. Networks come in turn from the libraries, one for each family first.

Example:
    python -m benchmarks.sweep_zoo --out benchmarks/results/sweep_zoo.jsonl --sample 3
    python -m benchmarks.sweep_zoo --checks plan quantize off restore save fuse
    python -m benchmarks.sweep_zoo --checks export deploy --retry
    python -m benchmarks.sweep_zoo --out benchmarks/results/sweep_zoo.jsonl --table
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Measured, zoo
from benchmarks.harness import Reporter
from benchmarks.zoo_checks import CHECKS, run_checks
from benchmarks.zoo_models import LIBRARIES, load, names

Row = dict[str, Any]
PEERS = (
    "timm",
    "transformers",
    "ultralytics",
    "segmentation-models-pytorch",
    "onnxruntime",
)


def run_one(name: str, checks: Sequence[str], limit: float, memory: float) -> Row:
    """Run checks of one network in a process of its own; return what it reported in time.

    Args:
        name: The network.
        checks: Names of checks.
        limit: Seconds of its processor; six times as many on the clock.
        memory: GiB.
    """
    fork = multiprocessing.get_context("fork")  # It has the libraries already.
    row: Row = {"model": name}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fields.jsonl")
        child = fork.Process(target=_work, args=(name, checks, limit, memory, path))
        child.start()
        child.join(6 * limit)
        end = _END.get(child.exitcode, f"exit {child.exitcode}")
        if child.exitcode is None:
            child.kill()
            child.join()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                row |= json.loads(line)
    if end:
        row |= {next((key for key in checks if key not in row), "end"): end}
    return row


#: What the end of a process means; "" for its own one.
_END = {0: "", None: "time limit on the clock", -signal.SIGXCPU: "time limit"}


def _work(
    name: str, checks: Sequence[str], limit: float, memory: float, path: Path
) -> None:
    """Run checks in this process, with limits, and write their fields to a file as they come."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, 2 * (int(memory * 2**30),))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    with (
        path.open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(sys.stderr),
    ):
        for fields in run_checks(name, checks):
            print(json.dumps(fields), file=file, flush=True)


def read(path: Path) -> list[Row]:
    """Return the results in a file, of each network the last one of each check."""
    if not path.exists():
        return []
    rows: dict[str, Row] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "result":
            rows[line["model"]] = rows.get(line["model"], {}) | line
    return list(rows.values())


def choose(libraries: Iterable[str], sample: int | None, match: str) -> list[str]:
    """Return the names to run, one library after the other in turn.

    Args:
        libraries: Where to take networks from.
        sample: Only so many of each library, spread over its list; None for all.
        match: Only names that contain this.
    """
    chosen: list[list[str]] = []
    for library in libraries:
        matching = [name for name in names(library) if match in name]
        if sample is not None and len(matching) > sample:
            matching = [matching[i * len(matching) // sample] for i in range(sample)]
        chosen.append(matching)
    turns = itertools.zip_longest(*chosen)
    return [name for turn in turns for name in turn if name is not None]


def missing(row: Row, checks: Sequence[str], retry: bool) -> list[str]:
    """Return the checks that a network has no result of; with ``retry`` also those that failed."""
    return [key for key in checks if key not in row or (retry and row[key] != "ok")]


def summary(rows: Sequence[Row]) -> str:
    """Return the reason of each failure."""
    lines = [
        f"{row['model']}, {key}: {row[key]}"
        for row in rows
        for key in CHECKS
        if row.get(key, "ok") != "ok"
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sweep, or one network of it, or print the table of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/sweep_zoo.jsonl")
    )
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES)
    )
    parser.add_argument(
        "--match", default="", help="only networks whose name contains this"
    )
    parser.add_argument(
        "--sample", type=int, help="only this many networks of each library"
    )
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument(
        "--limit", type=float, default=240, help="processor seconds of a network"
    )
    parser.add_argument("--memory", type=float, default=8, help="GiB for each network")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin none after this"
    )
    parser.add_argument(
        "--again", action="store_true", help="make checks with a result too"
    )
    parser.add_argument(
        "--retry", action="store_true", help="make checks that failed again"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the results, run nothing"
    )
    options = parser.parse_args(argv)
    if not options.table:
        _sweep(options)
    rows = read(options.out)
    print(zoo(Measured(rows)), summary(rows), sep="\n")


def _sweep(options: argparse.Namespace) -> None:
    rows = {} if options.again else {row["model"]: row for row in read(options.out)}
    for library in options.libraries:
        load(library)
    end = time.monotonic() + 60 * options.minutes
    with Reporter("sweep_zoo", options.out, PEERS) as report:
        for name in choose(options.libraries, options.sample, options.match):
            checks = missing(rows.get(name, {}), options.checks, options.retry)
            if checks and time.monotonic() < end:
                report.value(**run_one(name, checks, options.limit, options.memory))


if __name__ == "__main__":
    main()
