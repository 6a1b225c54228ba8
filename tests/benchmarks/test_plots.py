"""The pictures of README and of the site show what the results hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import plots

ROOT = Path(__file__).parents[2]


def texts(path: Path) -> list[str]:
    """Return every text of an SVG file, in order."""
    return re.findall(r">([^<>]+)</text>", path.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", plots.PICTURES)
def test_pictures_are_drawn_from_the_results(name: str, tmp_path: Path) -> None:
    plots.main([name, "--out", str(tmp_path)])
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.name for path in drawn] == [f"{name}-dark.svg", f"{name}-light.svg"]
    for path in drawn:
        known = ROOT / "docs" / "images" / path.name
        assert texts(path) == texts(known) != [], "run make figures"
