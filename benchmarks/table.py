"""Turn the JSON lines of benchmarks into Markdown tables, one for each run of a benchmark.

Example:
    python -m benchmarks.table benchmarks/results/fake_quantize.jsonl --columns candidate,ratio
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "markdown", "runs"]

DETAILS = ("ratio_low", "ratio_high", "rounds", "calls")
"""Fields of a timing that a table leaves out unless asked for."""

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

Record = dict[str, Any]


def runs(lines: Iterable[str]) -> Iterator[tuple[Record, list[Record]]]:
    """Split JSON lines into (environment, results) pairs: an environment opens a run.

    Raises:
        ValueError: for a line that is no record of the harness; the text says which line.
    """
    current: tuple[Record, list[Record]] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _read(line, number)
        if record["kind"] == "environment":
            if current is not None:
                yield current
            current = (record, [])
        elif current is None:
            raise ValueError(
                f"line {number}: a result before any environment; "
                "expected the output of benchmarks.harness.Reporter"
            )
        else:
            current[1].append(record)
    if current is not None:
        yield current


def _read(line: str, number: int) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {number}: not JSON ({error}); expected the output of benchmarks.harness.Reporter"
        ) from None
    if not isinstance(record, dict) or record.get("kind") not in ("environment", "result"):
        raise ValueError(
            f"line {number}: got {line.strip()[:60]!r}; "
            "expected an object with kind environment or result"
        )
    return record


def markdown(
    environment: Record, results: Sequence[Record], columns: Sequence[str] | None = None
) -> str:
    """Return a heading, a line on the environment and a table.

    Args:
        environment, results: one run.
        columns: fields to show, in order; by default all that occur, without the details of
            timings.
    """
    if columns is None:
        found = dict.fromkeys(key for record in results for key in record)
        columns = [key for key in found if key not in ("kind", "bench", *DETAILS)]
    rows = [columns, ["---"] * len(columns)]
    rows += [[_cell(column, record.get(column)) for column in columns] for record in results]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"### {environment['bench']}\n\n{_describe(environment)}\n\n{table}\n"


def _describe(environment: Record) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in environment.get("versions", {}).items()
    )
    threads = environment.get("threads")
    parts = [
        environment.get("gpu"),
        environment.get("cpu"),
        f"{threads} thread{'s' * (threads != 1)}",
        versions,
    ]
    return (
        ", ".join(part for part in parts if part)
        + f", commit {environment.get('commit') or 'unknown'}"
    )


def _cell(column: str, value: object) -> str:
    """Return the text of a value, formatted by the name of its column.

    Seconds (``*_s``) get a unit, ratios two digits and an ``x``, spreads are percentages, and other
    floats have four digits.
    """
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value).replace("|", "\\|")
    if column.endswith("_s"):
        unit, name = next(((unit, name) for unit, name in UNITS if value >= unit), UNITS[-1])
        return f"{value / unit:.3g} {name}"
    if column.startswith("ratio"):
        return f"{value:.2f}x"
    return f"{value:.0%}" if column == "spread" else f"{value:.4g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of the files named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, help="JSON lines written by a benchmark with --out"
    )
    parser.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        help="fields to show, separated by commas (default: all)",
    )
    options = parser.parse_args(argv)
    for path in options.files:
        try:
            found = list(runs(path.read_text(encoding="utf-8").splitlines()))
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
        for environment, results in found:
            print(markdown(environment, results, options.columns))


if __name__ == "__main__":
    main()
