"""Tables fit the terminal."""

import pytest

from torchq.utils import bullets, markdown_table, table, wrap

ROWS = [("name", "reason", "n"), ("a", "one two three four five six seven", "10")]


def test_columns_are_aligned_and_nothing_trails() -> None:
    assert table([("a", "bb"), ("ccc", "d")]).splitlines() == ["a    bb", "ccc  d"]


@pytest.mark.parametrize("width", range(22, 60))
def test_every_line_fits(width: int) -> None:
    message = table(ROWS, width=width)
    assert max(map(len, message.splitlines())) <= width
    assert " ".join(message.split()).count("10") == 1
    for word in ROWS[1][1].split():
        assert word in message


def test_a_word_longer_than_its_column_stays_whole() -> None:
    """A name that is cut cannot be copied; the other columns make what room they can."""
    message = table([("name", "path"), ("x y z " * 9, "a" * 50)], width=70)
    assert "a" * 50 in message
    assert max(map(len, message.splitlines())) <= 70


def test_a_table_narrower_than_its_columns_can_be_keeps_them_readable() -> None:
    assert "one" in table(ROWS, width=3)


def test_the_terminal_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, table(ROWS).splitlines())) <= 40
    assert max(map(len, wrap("word " * 30).splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "200")
    assert len(table(ROWS).splitlines()) == 2


def test_wrapped_text_keeps_line_breaks_and_indents() -> None:
    assert wrap("aa bb cc\ndd", indent="  ", width=6) == "aa bb\n  cc\ndd"


def test_markdown() -> None:
    assert markdown_table([("a", "b"), ("cc", "")]).splitlines()[1] == "| -- | - |"


def test_findings_are_grouped_and_wrapped() -> None:
    many = [f"layer{i}: is float: exclude it" for i in range(9)]
    message = bullets([*many, "all"], width=40)
    assert message.splitlines()[0].startswith("- layer0, layer1")
    assert "layer5 and 3 more: is float: exclude it" in " ".join(message.split())
    assert message.splitlines()[-1] == "- all"
    assert max(map(len, message.splitlines())) <= 40
