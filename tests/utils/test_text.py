"""Tables fit the terminal."""

import ast

import pytest

from torchq.utils import bullets, markdown_table, table, wrap, wrap_code

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


CODE = [
    "torchq.restore_(model); torchq.quantize_(model, config, target='a b', example=batches[0]); "
    "torchq.calibrate(model, batches)",
    "for q in select(model, ['one', 'two', 'three']).values(): q.quantizing = False\n"
    "torchq.calibrate(model, batches, force=True)",
    "torchq.calibrate(model, batches)  # with pictures of the objects that it is to find",
]


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("width", range(20, 140))
def test_code_of_any_width_can_be_pasted(code: str, width: int) -> None:
    shown = wrap_code(code, first="  -> ", indent="     ", width=width)
    assert shown.startswith("  -> ")
    pasted = shown.removeprefix("  -> ")
    assert ast.dump(ast.parse(pasted)) == ast.dump(ast.parse(code))
    if width >= 100:
        assert max(map(len, shown.splitlines())) <= width
    if width > len(code) + 5 and "\n" not in code:
        assert pasted == code


def test_code_is_broken_inside_brackets_and_comments_alone() -> None:
    code = "a = f(one, 'two three', four)  # and a comment of some words"
    shown = wrap_code(code, first="> ", indent="  ", width=24)
    assert shown.splitlines() == [
        "> a = f(one,",
        "  'two three', four)",
        "  # and a comment of",
        "  # some words",
    ]


def test_sentences_among_code_are_wrapped_between_words() -> None:
    text = "nothing, if these channels are meant to be 0"
    shown = wrap_code(text, first="> ", indent="  ", width=24)
    assert shown == wrap(f"> {text}", indent="  ", width=24)
    assert len(shown.splitlines()) > 1
