"""The calibration benchmark runs, and checks for itself that its candidates agree."""

from __future__ import annotations

import json

import pytest

from benchmarks.bench_calibration import main


def test_a_quick_run_reports_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--elements", "64000"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["kind"] == "environment"
    timed = {(row["what"], row["candidate"]) for row in rows if "ratio" in row}
    assert {
        ("collect", "clone"),
        ("collect", "torchq histogram"),
        ("estimate", "loop over edges"),
    } <= timed
    ranges = {row["method"]: row for row in rows if row.get("what") == "range" and "loop" in row}
    assert set(ranges) == {"mse", "entropy"}
    for row in ranges.values():
        assert abs(row["torchq"] - row["loop"]) <= row["bin_width"]
