"""The code of docs/calibration.md runs, in order, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import torchq
from torchq.calib import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")


def test_the_examples_run() -> None:
    names: dict[str, Any] = {"torch": torch, "torchq": torchq}
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    here = [block for block in blocks if "init_process_group" not in block]
    assert len(here) == len(blocks) - 1 == 3
    try:
        for block in here:
            exec(block, names)
    finally:
        if "deviations" in ESTIMATORS:
            ESTIMATORS.remove("deviations")
    assert all(
        q.calibrated for q in names["model"].modules() if isinstance(q, torchq.TensorQuantizer)
    )


def test_every_method_is_described() -> None:
    described = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {*described, "histogram"} == {*torchq.calib.methods()}


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"(?:tests|benchmarks|torchq|docs)/[\w/]+\.(?:py|md)", TEXT)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
