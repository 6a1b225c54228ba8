"""The parts of every benchmark: interleaved timing, a description of the machine, JSON lines.

A benchmark is a program in this folder with a function ``main(argv=None)`` that looks like this::

    def main(argv: Sequence[str] | None = None) -> None:
        options = parse(parser(__doc__), argv)
        with Reporter("fake_quantize", options.out) as report:
            candidates = {"torch": lambda: ..., "torchq": lambda: ...}
            for row in compare(candidates, baseline="torch", **timing(options)):
                report.timing(row, elements=2**20)

The timer is that of torchq/utils/timing.py. A ratio is computed inside each round, and the figure
is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor

from torchq.utils.timing import Samples, quartiles, time_calls


@dataclass(frozen=True)
class Timing:
    """The time that one call of one candidate needs.

    ``median_s`` and ``least_s`` are seconds per call over rounds, ``spread`` is the interquartile
    range over the median: 0.02 is quiet, 0.3 is a machine in use. ``ratio`` is the median over the
    ratios to the ``baseline`` inside each round, below 1 is faster; ``ratio_low`` and
    ``ratio_high`` are its quartiles. ``rounds`` samples were taken, of ``calls`` calls each.
    """

    candidate: str
    median_s: float
    spread: float
    ratio: float
    ratio_low: float
    ratio_high: float
    baseline: str
    rounds: int
    calls: int
    least_s: float = 0.0


def compare(
    candidates: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    rounds: int = 15,
    warmup: int = 3,
    min_time: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time ``candidates`` against each other.

    Args:
        candidates: name -> a call to time. They should do the same work; the benchmark checks it.
        baseline: the candidate that ratios refer to.
        rounds: samples of each candidate.
        warmup: untimed calls of each candidate before the first sample.
        min_time: seconds that a sample lasts at least; short calls are repeated until it does.
        clock: seconds, for tests.
    """
    if baseline not in candidates:
        raise ValueError(
            f"baseline: got {baseline!r}; expected one of {', '.join(candidates)}"
        )
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"rounds, warmup: got {rounds}, {warmup}; expected at least 1 and 0"
        )

    seconds = time_calls(
        candidates, rounds=rounds, warmup=warmup, min_time=min_time, clock=clock
    )
    return [_summarize(name, seconds, baseline) for name in candidates]


def _summarize(name: str, found: Mapping[str, Samples], baseline: str) -> Timing:
    low, middle, high = found[name].quartiles
    ratios = (
        a / b for a, b in zip(found[name].seconds, found[baseline].seconds, strict=True)
    )
    ratio_low, ratio, ratio_high = quartiles(tuple(ratios))
    return Timing(
        name,
        middle,
        (high - low) / middle,
        ratio,
        ratio_low,
        ratio_high,
        baseline,
        len(found[name].seconds),
        found[name].calls,
        min(found[name].seconds),
    )


def decibels(found: Tensor, expected: Tensor) -> float:
    """Return the ratio of the expected values to the error in dB; 200 for equal ones."""
    error = (found.double() - expected.double()).square().sum()
    signal = expected.double().square().sum()
    return (
        round(min(float(10 * torch.log10(signal / error)), 200.0), 1)
        if error
        else 200.0
    )


def environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Return the conditions of a figure: hardware, threads, versions and commit.

    Versions include those of ``packages`` that are installed. No host or user is named.
    """
    versions = {}
    for package in ("torch", "torchvision", *packages):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str | None:
    """Return the short hash of the commit, with ``+`` where tracked files differ from it.

    Outside a repository there is none, and the result is None.
    """
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


class Reporter:
    """Prints one JSON object per line, first the environment; a context manager.

    Args:
        bench: name of the benchmark, on every line.
        out: file to append the lines to as well.
        packages: peers whose versions matter.
    """

    def __init__(
        self, bench: str, out: Path | None = None, packages: Iterable[str] = ()
    ) -> None:
        self._bench = bench
        self._out = out
        self._packages = tuple(packages)
        self._file: TextIO | None = None

    def __enter__(self) -> Reporter:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._out.open("a", encoding="utf-8")
        self._write("environment", environment(self._packages))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def timing(self, row: Timing, **case: object) -> None:
        """Report one timing; ``case`` says what was timed (sizes, dtype, ...)."""
        self._write("result", {**case, **vars(row)})

    def value(self, **fields: object) -> None:
        """Report anything that is not a time: accuracy, size, agreement."""
        self._write("result", fields)

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        line = json.dumps({"kind": kind, "bench": self._bench, **fields})
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def stored_rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none where there is no file."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row for row in rows if row["kind"] == "result"]


def finished_rows(path: Path | None, *names: str) -> set[tuple[Any, ...]]:
    """Return the rows that a file of results has already, each as its values of ``names``."""
    return {tuple(row.get(name) for name in names) for row in stored_rows(path)}


def parser_of_networks(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for :func:`fill_or_show`; the benchmark adds its own options."""
    options = parser(description)
    options.add_argument("--only", default="*", help="a pattern of names of networks")
    options.add_argument("--table", action="store_true", help="print the rows of --out")
    return options


def fill_or_show(
    options: argparse.Namespace,
    bench: str,
    packages: Iterable[str],
    cases: Mapping[tuple[Any, ...], Callable[[], Mapping[str, Any]]],
    key: Sequence[str],
    show: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Print the table of a file where ``--table`` says so; measure the rows that it lacks if not.

    Args:
        options: of :func:`parser_of_networks`.
        bench: the name of the benchmark.
        packages: whose versions are stored.
        cases: what tells a row from others, the name of a network first -> measures the row.
        key: the names of these values in a row.
        show: returns the table of some rows.
    """
    if options.table:
        print(show(stored_rows(options.out)))
        return
    done = finished_rows(options.out, *key)
    warnings.simplefilter("ignore")
    with Reporter(bench, options.out, packages) as report:
        for case, measure in cases.items():
            if case not in done and fnmatchcase(case[0], options.only):
                report.value(**measure())


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; the benchmark adds its own."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers: list[tuple[str, float, str]] = [
        ("--rounds", 15, "samples of each candidate"),
        ("--warmup", 3, "untimed calls of each candidate"),
        ("--min-time", 0.02, "seconds that a sample lasts at least"),
        ("--threads", 1, "torch threads"),
    ]
    for name, default, meaning in numbers:
        described = f"{meaning} (default: %(default)s)"
        result.add_argument(name, type=type(default), default=default, help=described)
    result.add_argument(
        "--quick",
        action="store_true",
        help="one round without repeats: shows that the program runs, measures nothing",
    )
    result.add_argument(
        "--out", type=Path, help="append the JSON lines to this file as well"
    )
    return result


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse, then apply ``--threads`` and ``--quick``."""
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.quick:
        options.rounds, options.warmup, options.min_time = 1, 1, 0.0
    return options


def timing(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`compare` that come from the command line."""
    return {
        "rounds": options.rounds,
        "warmup": options.warmup,
        "min_time": options.min_time,
    }
