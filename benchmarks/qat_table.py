"""Print the table of docs/benchmarks.md that compares the methods of training.

Each method stands for its seeds: the mean accuracy, and the lowest and the highest.

Example:
    python -m benchmarks.qat_table benchmarks/results/accuracy_qat.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.table import runs

__all__ = ["compared", "main"]

#: What the names of the compared methods begin with.
_PREFIX = "short: "


def compared(lines: Iterable[str]) -> str:
    """Return the table of the methods, the best one first.

    Args:
        lines: of the file that accuracy_qat appended to; a later row replaces an earlier one of
            the same method and seed.
    """
    methods: dict[str, dict[int, dict[str, Any]]] = {}
    for _, results in runs(lines):
        for row in results:
            if str(row["method"]).startswith(_PREFIX):
                name = row["method"].removeprefix(_PREFIX)
                methods.setdefault(name, {})[row["seed"]] = row
    rows = [_row(name, list(seeds.values())) for name, seeds in methods.items()]
    head = "| method | accuracy | range | seeds | oscillating weights |\n|---|---|---|---|---|"
    return "\n".join([head, *(text for _, text in sorted(rows, reverse=True))])


def _row(name: str, seeds: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Return the mean accuracy of a method, and its line."""
    found = [row["accuracy"] for row in seeds]
    mean, moving = fmean(found), [row["oscillating"] for row in seeds if "oscillating" in row]
    share = f"{fmean(moving):.1%}" if moving else ""
    spread = f"{min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""
    return mean, f"| {name} | {mean:.2f} | {spread} | {len(found)} | {share} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("file", type=Path, help="JSON lines of accuracy_qat")
    path = options.parse_args(argv).file
    print(compared(path.read_text(encoding="utf-8").splitlines()))


if __name__ == "__main__":
    main()
