"""The harness with a clock that the test moves: nothing here measures real time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import harness

SECONDS = {"slow": 4.0, "fast": 1.0}


class Workload:
    """Return candidates that move a clock by their cost; ``drift`` multiplies it after a round."""

    def __init__(self, drift: float = 1.0) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.drift = drift

    def clock(self) -> float:
        return self.now

    def candidates(self) -> dict[str, Callable[[], None]]:
        def run(name: str) -> None:
            self.order.append(name)
            self.now += SECONDS[name] * self.drift ** ((len(self.order) - 1) // 2)

        return {name: lambda name=name: run(name) for name in SECONDS}  # type: ignore[misc]


def test_medians_and_ratios() -> None:
    work = Workload()
    slow, fast = harness.compare(
        work.candidates(), baseline="slow", rounds=5, min_time=0.0, clock=work.clock
    )
    assert (slow.candidate, slow.median_s, slow.ratio, slow.spread) == (
        "slow",
        4.0,
        1.0,
        0.0,
    )
    assert (
        fast.candidate,
        fast.median_s,
        fast.ratio,
        fast.baseline,
        fast.rounds,
        fast.calls,
    ) == (
        "fast",
        1.0,
        0.25,
        "slow",
        5,
        1,
    )


def test_a_machine_that_slows_down_does_not_change_the_ratio() -> None:
    work = Workload(drift=1.5)
    _, fast = harness.compare(
        work.candidates(),
        baseline="slow",
        rounds=6,
        warmup=0,
        min_time=0.0,
        clock=work.clock,
    )
    assert fast.ratio == pytest.approx(0.25)
    assert fast.spread > 1.0


def test_candidates_are_interleaved_and_take_turns_to_be_first() -> None:
    work = Workload()
    harness.compare(
        work.candidates(),
        baseline="fast",
        rounds=3,
        warmup=2,
        min_time=0.0,
        clock=work.clock,
    )
    assert (
        work.order[:6] == ["slow"] * 3 + ["fast"] * 3
    )  # two warm-up calls each, and one to learn how long a call takes
    assert work.order[6:] == ["slow", "fast", "fast", "slow", "slow", "fast"]


def test_short_calls_are_repeated_within_a_sample() -> None:
    work = Workload()
    slow, fast = harness.compare(
        work.candidates(),
        baseline="fast",
        rounds=2,
        warmup=0,
        min_time=8.0,
        clock=work.clock,
    )
    assert (slow.calls, fast.calls) == (2, 8)
    assert (slow.median_s, fast.median_s) == (4.0, 1.0)


def test_the_call_behind_another_candidate_is_not_timed() -> None:
    work = Workload()

    def run(name: str) -> None:
        found_caches_cold = work.order[-1:] != [name]
        work.order.append(name)
        work.now += 10.0 if found_caches_cold else 1.0

    candidates = {name: lambda name=name: run(name) for name in SECONDS}
    rows = harness.compare(
        candidates, baseline="slow", rounds=4, warmup=1, min_time=3.0, clock=work.clock
    )
    assert [(row.calls, row.median_s) for row in rows] == [(3, 1.0), (3, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"baseline": "other"}, "'other'; expected one of slow, fast"),
        ({"baseline": "slow", "rounds": 0}, "expected at least 1 and 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness.compare(Workload().candidates(), **arguments)  # type: ignore[arg-type]


def test_environment_names_hardware_and_versions_only() -> None:
    actual = harness.environment(["tqdm", "a-package-that-is-not-there"])
    assert (
        actual["versions"]["torch"] == torch.__version__.partition("+")[0]
        or torch.__version__ in actual["versions"]["torch"]
    )
    assert "tqdm" in actual["versions"]
    assert "a-package-that-is-not-there" not in actual["versions"]
    assert actual["threads"] == torch.get_num_threads()
    assert not any(
        part in json.dumps(actual) for part in (str(Path.home()) + "/", str(Path.cwd()))
    )


def test_lines_are_printed_and_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "lines.jsonl"
    row = harness.Timing("fast", 2.5e-3, 0.04, 0.25, 0.2, 0.3, "slow", 5, 1, 2e-3)
    for name in ("demo", "again"):
        with harness.Reporter(name, out) as report:
            report.timing(row, elements=1024)
            report.value(candidate="accuracy", top1=0.98765)
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["kind"] for line in lines] == 2 * ["environment", "result", "result"]
    assert lines[1]["elements"] == 1024
    assert lines[1]["least_s"] == 2e-3
    assert lines[5]["bench"] == "again"
    assert lines[5]["top1"] == 0.98765


def test_options() -> None:
    options = harness.parse(
        harness.parser("What it measures."), ["--quick", "--threads", "1"]
    )
    assert harness.timing(options) == {"rounds": 1, "warmup": 1, "min_time": 0.0}
    assert harness.timing(harness.parse(harness.parser(None), ["--rounds", "4"])) == {
        "rounds": 4,
        "warmup": 3,
        "min_time": 0.02,
    }


def test_finished_rows_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert harness.finished_rows(None, "a") == harness.finished_rows(path, "a") == set()
    with harness.Reporter("bench", path) as report:
        report.value(a=1, b="x", figure=0.5)
        report.value(a=2, b=None, figure=0.25)
    assert harness.finished_rows(path, "b", "a") == {("x", 1), (None, 2)}
