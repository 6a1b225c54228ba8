"""Is a file with the operators that a target adds ever slower than one of the layers alone?

What a target quantizes beside layers buys time and never accuracy, so a file with it must not be
slower. For each network and runtime :func:`torchq.forecast` writes three files, float, all that the
plan allows and the layers alone, and times them in every round, in turn. ``ratio`` is the time of
the second over that of the third, ``noise`` what the quartiles of both say it may be off, and
``least`` the same ratio of the shortest times, which other work on the machine changes least. A row
is slow where ``ratio`` is above 1.03 by more than the noise and ``least`` is above 1.03 too.
Weights are random, which changes no time. Where a plan adds no operator both are one file, and
there is no ratio.

A second run goes on after the rows of the file.

Example:
    python -m benchmarks.added_time --out benchmarks/results/added_time.jsonl
    python -m benchmarks.added_time --out FILE --table
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torchq
from benchmarks.harness import fill_or_show, parse, parser_of_networks
from benchmarks.pays import NETWORKS, TARGETS
from benchmarks.qnn_networks import network
from torchq.analysis.forecast import FLOAT, INT8, LAYERS, TimedFile
from torchq.utils.text import table

#: By how much such a file may be slower, beyond noise.
_ALLOWED = 0.03


def measure(name: str, target: str) -> dict[str, Any]:
    """Return the row of a network on a runtime."""
    model, images = network(name)
    timed = torchq.forecast(model, images[:1], target, threads=1, progress=False)
    whole, layers, before = (timed[target].best(n) for n in (INT8, LAYERS, FLOAT))
    row: dict[str, Any] = {"network": name, "target": target}
    if before is not None and whole is not None:
        row["float_ms"] = round(before.milliseconds, 4)
        row["all_ms"] = round(whole.milliseconds, 4)
    if whole is not None and layers is not None:
        row["ratio"] = round(whole.milliseconds / layers.milliseconds, 4)
        row["noise"] = round(math.hypot(whole.noise, layers.noise), 4)
        row["least"] = round(_least(whole) / _least(layers), 4)
    return row


def _least(file: TimedFile) -> float:
    """Return the shortest time of a file, in seconds."""
    assert file.samples is not None
    return min(file.samples.seconds)


def is_slow(row: dict[str, Any]) -> bool:
    """Return True for a file that is slower than that of the layers alone."""
    if "ratio" not in row or row["ratio"] <= 1 + _ALLOWED + row["noise"]:
        return False
    return bool(row.get("least", math.inf) > 1 + _ALLOWED)


def shown(rows: list[dict[str, Any]]) -> str:
    """Return the table of some rows."""
    lines: list[tuple[str, ...]] = [("network", "target", "ratio", "noise", "slow")]
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "one file"
        noise = f"{row['noise']:.2f}" if "noise" in row else ""
        slow = "SLOW" if is_slow(row) else ""
        lines.append((row["network"], row["target"], ratio, noise, slow))
    slow_rows = sum(map(is_slow, rows))
    return table(lines, f"{slow_rows} of {len(rows)} are slower by more than 3 %")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, or print the table."""
    options = parse(parser_of_networks(__doc__), argv)
    cases = {
        (name, target): partial(measure, name, target)
        for name in NETWORKS
        for target in TARGETS
    }
    fill_or_show(options, "added_time", TARGETS, cases, ("network", "target"), shown)


if __name__ == "__main__":
    main()
