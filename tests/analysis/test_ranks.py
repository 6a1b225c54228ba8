"""Two gloo ranks with batches of their own find what one process finds with all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.ranks import all_batches, analysed, network
from tests.rank_processes import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what each rank found."""
    pytest.importorskip("scipy")
    found = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("ranks.py"), found)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("alone") / "report.json"
    found: dict[str, Any] = json.loads(json.dumps(analysed(network(), all_batches(), path)))
    return found


def assert_alike(found: Any, expected: Any, where: str = "") -> None:
    """Compare JSON data; sums over batches are added in another order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_alike(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_alike(*pair, f"{where}[{number}]")
    elif isinstance(expected, float):
        # Reports hold five digits, of which the last one may be rounded the other way.
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-9), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("part", ["errors", "fisher", "sqnr", "plan", "report"])
def test_ranks_find_what_one_process_finds(folder: Path, alone: Any, part: str) -> None:
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first[part] == second[part]
    assert_alike(first[part], alone[part], part)


def test_the_first_rank_writes_the_file(folder: Path) -> None:
    assert json.loads((folder / "report0.json").read_text())["batches"] == 5
    assert not (folder / "report1.json").exists()
