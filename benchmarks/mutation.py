"""Plant small faults where a wrong number is silent, and count those that the tests notice.

The same number of mutants is drawn, with a seed, from each package of ``PACKAGES``. Each is written
into a copy of the repository, in which the tests of that package run until one fails. A mutant is
``killed`` by a test that fails, by a run that does not end or by a file that cannot be imported,
and ``survived`` otherwise. A test counts as the killer only if it passes without the mutant.

One run of the tests with contexts says which test executes which line, so that only tests that can
notice a mutant run::

    pip install pytest-cov
    python -m pytest -n 2 --cov=torchq --cov-context=test --cov-report=
    python -m benchmarks.mutation --seed 1 --coverage .coverage \
        --out benchmarks/results/mutation.jsonl

Each verdict is stored at once, and a run with the same ``--out`` and ``--seed`` goes on behind it.
With ``--survivors`` those that survived meet all tests of their package.
Mutants that no input can tell apart stand in benchmarks/mutation_equivalent.json, key and reason,
and are not counted. ``--table`` prints the shares of a file of results.

Why no library: mutmut runs functions through trampolines, and torchq reads the source of the
forwards that it rewrites; cosmic-ray knows no tests of a line, and a dozen variants of each
operator, most of which no test can overlook.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.mutants import Mutant, is_valid, mutants_of

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "benchmarks" / "mutation_equivalent.json"
# The sources of a package and its tests.
PACKAGES = {
    "formats": ("torchq/formats", "tests/formats"),
    "functional": ("torchq/functional", "tests/functional"),
    "calib": ("torchq/calib", "tests/calib"),
    "nn": ("torchq/nn", "tests/nn"),
    "swap": ("torchq/swap", "tests/swap"),
    "onnx": ("torchq/onnx", "tests/onnx"),
    "lowering": ("torchq/lowering", "tests/lowering"),
    "correction": ("torchq/workflow/correction.py", "tests/workflow"),
}
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "_build", ".*_cache", "results"
)
SECONDS = 600  # for the tests of one mutant


def sources_of(root: Path, where: str) -> dict[str, str]:
    """Return the Python files of a folder, or one file, by their paths in the repository."""
    place = root / where
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text("utf-8") for path in files}


def draw(
    root: Path, packages: Iterable[str], count: int, seed: int
) -> dict[str, list[Mutant]]:
    """Draw ``count`` mutants in all, the same number from each package."""
    names = list(packages)
    return {name: _draw_from(root, name, count // len(names), seed) for name in names}


def _draw_from(root: Path, package: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of one package, without those that are no Python."""
    sources = sources_of(root, PACKAGES[package][0])
    mutants = [mutant for path in sources for mutant in mutants_of(path, sources[path])]
    Random(f"{seed} {package}").shuffle(mutants)
    drawn: list[Mutant] = []
    for mutant in mutants:
        if len(drawn) < count and is_valid(mutant, sources[mutant.path]):
            drawn.append(mutant)
    return drawn


class Contexts:
    """The tests that execute a line, as coverage.py wrote them down.

    Args:
        path: the SQLite file that ``--cov-context=test`` leaves, of lines or of branches.
        root: the repository as it was when the file was written.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self._root = root

    @cached_property
    def _names(self) -> dict[int, str]:
        return dict(self._database.execute("select id, context from context"))

    @cached_property
    def _files(self) -> dict[str, int]:
        rows = self._database.execute("select id, path from file")
        return {str(Path(path)).split("/torchq/")[-1]: number for number, path in rows}

    def _executing(self, path: str, line: int | None) -> list[str]:
        """Return the contexts that execute a line of a file, or any line of it for None."""
        number = self._files.get(path.removeprefix("torchq/"))
        # Of branches there are pairs of lines, negative at entry and exit; of lines a bit each.
        arcs = "select distinct context_id from arc where file_id = ?"
        parameters: tuple[int | None, ...] = (number,)
        if line is not None:
            arcs += " and (fromno in (?, ?) or tono in (?, ?))"
            parameters += (line, -line, line, -line)
        contexts = {row[0] for row in self._database.execute(arcs, parameters)}
        bits = "select context_id, numbits from line_bits where file_id = ?"
        for context, blob in self._database.execute(bits, (number,)):
            if line is None or (
                line // 8 < len(blob) and blob[line // 8] >> line % 8 & 1
            ):
                contexts.add(context)
        return [self._names[context] for context in contexts]

    def tests_of(self, mutant: Mutant, folder: str) -> list[str]:
        """Return the tests below ``folder`` that execute the line of a mutant.

        A line that is executed while modules are imported has no test of its own: all tests that
        execute any line of the file stand for it. Where no test below ``folder`` executes the line,
        those of other packages do; and where none does in its own process, the tests of the file's
        name stand, since they may run it in another one.
        """
        contexts = self._executing(mutant.path, mutant.line)
        if "" in contexts:
            contexts = self._executing(mutant.path, None)
        tests = {context.rpartition("|")[0] for context in contexts}
        chosen = {test for test in tests if test.startswith(f"{folder}/")} or tests - {
            ""
        }
        # The tests of the file's own name come first: they are the likeliest to fail.
        name = Path(mutant.path).stem
        if not chosen:
            files = sorted((self._root / folder).glob(f"test_*{name}*.py"))
            return [str(path.relative_to(self._root)) for path in files]
        return sorted(chosen, key=lambda test: (f"test_{name}" not in test, test))


class _FirstFailure:
    """A plugin of pytest that notes the first test that fails."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure of a test or of its fixtures."""
        if report.failed and not self.test:
            self.test = report.nodeid


def _run_pytest(folder: str, arguments: Sequence[str], sender: Any) -> None:
    """Run pytest in this process, and send its exit code and the first test that failed."""
    import pytest

    os.chdir(folder)
    # What is tested is the copy, and nothing of it may be here already.
    sys.path[:] = [
        folder,
        *(path for path in sys.path if Path(path or ".").resolve() != ROOT),
    ]
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = folder
    # Python would take the compiled file of a mutant of the same size and second.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    failure = _FirstFailure()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        code = pytest.main(list(arguments), plugins=[failure])
    sender.send((int(code), failure.test))


@dataclass
class Copy:
    """A copy of the repository in which one mutant at a time is planted and tested.

    Each run is a fork of a process that has imported torch, which takes longer than most tests.
    """

    folder: Path
    options: Sequence[str] = ()
    passes_alone: dict[str, bool] = field(default_factory=dict)

    def run(self, tests: Sequence[str]) -> tuple[str, str]:
        """Run tests until one fails; return ``passed``, ``failed`` or ``timeout``, and the test."""
        names = self.folder / "tests_of_the_mutant.txt"
        names.write_text("\n".join(tests), "utf-8")
        arguments = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *self.options,
            f"@{names.name}",
        ]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "onnx", "pytest"])
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_pytest, args=(str(self.folder), arguments, sender)
        )
        process.start()
        sender.close()
        try:
            code, test = receiver.recv() if receiver.poll(SECONDS) else (None, "")
        except EOFError:  # The process died.
            code, test = 1, "the process died"
        process.kill()
        process.join()
        if code is None:
            return "timeout", ""
        return ("passed", "") if code == 0 else ("failed", test or "import")

    def verdict(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str]:
        """Return ``killed`` or ``survived``, and the test that failed.

        A test that fails without the mutant too is left out, and the rest runs again.
        """
        path = self.folder / mutant.path
        source = path.read_text("utf-8")
        remaining = [test for test in tests if self.passes_alone.get(test, True)]
        while remaining:
            path.write_text(mutant.apply(source), "utf-8")
            try:
                outcome, test = self.run(remaining)
            finally:
                path.write_text(source, "utf-8")
            if outcome == "passed":
                return "survived", ""
            if outcome == "timeout" or test not in remaining or self.passes(test):
                return "killed", test or outcome
            remaining.remove(test)
        return "survived", ""

    def passes(self, test: str) -> bool:
        """Tell whether a test passes without any mutant; asked once for each test."""
        if test not in self.passes_alone:
            self.passes_alone[test] = self.run([test])[0] == "passed"
        return self.passes_alone[test]


def equivalents() -> dict[str, str]:
    """Return the keys of mutants that no input can tell apart, with the reason."""
    return dict(json.loads(EQUIVALENT.read_text("utf-8")))


def stored_rows(path: Path | None, seed: int) -> dict[str, dict[str, Any]]:
    """Return the newest result of each mutant of a seed in a file, by key."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {
        row["key"]: row
        for row in rows
        if row["kind"] == "result" and row["seed"] == seed
    }


def table(path: Path, seed: int) -> str:
    """Return a Markdown table of the shares that the tests killed, by package."""
    rows = list(stored_rows(path, seed).values())
    excused = equivalents()
    lines = [
        "| package | mutants | equivalent | killed | share |",
        "|---|---|---|---|---|",
    ]
    for name in [*PACKAGES, "all"]:
        mutants = [row for row in rows if name in ("all", row["package"])]
        counted = [row for row in mutants if row["key"] not in excused]
        killed = sum(row["verdict"] == "killed" for row in counted)
        share = f"{100 * killed / len(counted):.0f} %" if counted else "-"
        cells = [name, len(mutants), len(mutants) - len(counted), killed, share]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--count", type=int, default=120, help="mutants in all")
    result.add_argument("--seed", type=int, default=1)
    result.add_argument(
        "--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES)
    )
    result.add_argument("--coverage", type=Path, help="which tests execute which line")
    result.add_argument(
        "--root", type=Path, default=ROOT, help="the repository that is tested"
    )
    result.add_argument(
        "--options", nargs="+", default=[], help="further options of pytest"
    )
    result.add_argument(
        "--survivors",
        action="store_true",
        help="run all tests of its package for each mutant that survived: some tests start other "
        "processes, in which no coverage is measured",
    )
    result.add_argument(
        "--only", help="run the mutant whose key contains this text again"
    )
    result.add_argument(
        "--table", action="store_true", help="print the shares of --out"
    )
    result.add_argument(
        "--out", type=Path, help="append the JSON lines to this file as well"
    )
    return result.parse_args(argv)


def is_wanted(
    mutant: Mutant, options: argparse.Namespace, stored: Mapping[str, Any]
) -> bool:
    """Tell whether a mutant is to be run: it is named, has survived, or has no verdict yet."""
    if options.only is not None:
        return options.only in mutant.key
    if options.survivors:
        return mutant.key in stored and stored[mutant.key]["verdict"] == "survived"
    return mutant.key not in stored


def measure(copy: Copy, options: argparse.Namespace, report: Any) -> None:
    """Draw mutants, and report the verdict of each that has none yet."""
    contexts = Contexts(options.coverage, options.root) if options.coverage else None
    stored = stored_rows(options.out, options.seed)
    # Always drawn from all packages, so that --packages selects a part of the same mutants.
    drawn = draw(options.root, PACKAGES, options.count, options.seed)
    for package in options.packages:
        folder = PACKAGES[package][1]
        for mutant in drawn[package]:
            if not is_wanted(mutant, options, stored):
                continue
            began = time.monotonic()
            is_whole = contexts is None or options.survivors
            tests = [folder] if is_whole else contexts.tests_of(mutant, folder)
            verdict, test = copy.verdict(mutant, tests)
            fields = {
                "seed": options.seed,
                "package": package,
                "key": mutant.key,
                "line": mutant.line,
                "mutation": mutant.kind,
                "verdict": verdict,
                "test": test,
                "tests": len(tests),
                "seconds": round(time.monotonic() - began, 1),
            }
            report.value(**fields)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or print the table of an earlier run."""
    # Forked processes import this file, and must not import the torchq of this repository with it.
    from benchmarks.harness import Reporter

    options = parse(argv)
    if options.table:
        print(table(options.out, options.seed))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        Reporter("mutation", options.out, ("pytest", "coverage")) as report,
    ):
        place = Path(folder) / "repository"
        shutil.copytree(options.root, place, ignore=NOT_COPIED)
        measure(Copy(place, options.options), options, report)


if __name__ == "__main__":
    main()
