"""The pages show what the results hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_pages_show_the_newest_results(page: Path) -> None:
    message = page.read_text("utf-8")
    assert figures.filled(message, figures.read_results()) == message, (
        "run make figures"
    )


def test_every_table_is_on_a_page() -> None:
    shown = [
        actual[2]
        for page in figures.PAGES
        for actual in figures.TABLE.finditer(page.read_text())
    ]
    assert sorted(shown) == sorted(figures.TABLES)


def test_a_table_without_its_results_says_which_are_missing() -> None:
    row = {"bench": "fuse", "part": "exact", "network": "a"}
    measured = figures.Measured(
        [row, {**row, "network": "b", "error": 1}, {**row, "error": 2}]
    )
    assert measured.value("error", "fuse", part="exact") == 2
    with pytest.raises(LookupError, match=r"no line of fuse has error and .*'c'"):
        measured.value("error", "fuse", network="c")
