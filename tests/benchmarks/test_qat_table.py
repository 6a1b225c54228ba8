"""The table of the methods of training holds the mean and the range of the seeds."""

import json

from benchmarks.qat_table import compared


def _line(method: str, seed: int, accuracy: float, **more: float) -> str:
    row = {"method": method, "seed": seed, "accuracy": accuracy, **more}
    return json.dumps({"kind": "result", "bench": "accuracy_qat", **row})


def test_a_method_stands_for_its_seeds() -> None:
    lines = [
        json.dumps({"kind": "environment", "bench": "accuracy_qat"}),
        _line("short: lsq", 0, 80.0, oscillating=0.5),
        _line("short: ewgs", 0, 85.0),
        _line("short: lsq", 1, 86.0, oscillating=0.01),
        _line("short: lsq", 0, 88.0, oscillating=0.03),
        _line("lsq, distilled", 0, 10.0),
    ]
    assert compared(lines).splitlines()[2:] == [
        "| lsq | 87.00 | 86.00 to 88.00 | 2 | 2.0% |",
        "| ewgs | 85.00 |  | 1 |  |",
    ]
