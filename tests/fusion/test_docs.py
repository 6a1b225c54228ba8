"""docs/fuse.md lists every family; every family is described and tested."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fusion.blocks import all_cases
from torchq.fusion import FAMILIES

TEXT = (Path(__file__).parents[2] / "docs" / "fuse.md").read_text(encoding="utf-8")


def test_every_family_has_a_row_and_no_row_is_left_over() -> None:
    rows = [line.split("|") for line in TEXT.splitlines() if line.startswith("|")]
    table = [row for row in rows if len(row) == 6 and "`" in row[2]]
    listed = [name for row in table for name in re.findall(r"`([^`]+)`", row[2])]
    assert sorted(listed) == sorted(rule.name for rule in FAMILIES)


def test_every_family_is_merged_by_a_test() -> None:
    """The others have tests of their own: their blocks are no maps of one feature map."""
    tested = {case.family for case in all_cases().values()}
    others = {
        "repvgg-custom-l2",
        "repvit-classifier",
        "timm-distilled-classifier",
        "yolov7-implicit",
    }
    assert {rule.name for rule in FAMILIES} - tested == others
