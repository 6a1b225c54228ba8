"""The names and limits of docs/migration.md are true; tests/test_docs.py runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import torchq
from torchq.compat import shim as shim

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


def test_names_of_torchq_exist() -> None:
    named = set(re.findall(r"`(?:with )?(torchq(?:\.\w+)+)", PAGE))
    assert len(named) > 10
    for name in named:
        found = torchq
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        assert found is not None
