"""docs/calibration.md describes every method; tests/test_docs.py runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import torchq

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")


def test_every_method_is_described() -> None:
    described = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {*described, "histogram"} == {*torchq.calib.methods()}
