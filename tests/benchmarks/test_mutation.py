"""Faults that benchmarks/mutation.py plants are Python, and its verdicts are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutants import mutants_of
from benchmarks.mutation import Copy

SOURCE = '''
def scale(amax: float, qmax: int = 127) -> float:
    """Return 1 + 2."""
    if amax < 0:
        raise ValueError("amax" * 2)
    return min(amax, 1000.0) / qmax
'''


def replacements(source: str) -> set[tuple[str, str]]:
    return {
        (mutant.text, mutant.replacement) for mutant in mutants_of("scale.py", source)
    }


def test_numbers_operators_and_opposites_are_replaced_and_sentences_are_not() -> None:
    assert replacements(SOURCE) == {
        ("127", "128"),
        ("<", "<="),
        ("0", "1"),
        ("min", "max"),
        ("1000.0", "1001.0"),
        ("/", "*"),
    }


@pytest.mark.parametrize(
    ("source", "replacement"),
    [
        ("a = not b", ("not ", "")),
        ("a = b and c", ("and", "or")),
        ("a = -b", ("-", "")),
        ("a.sort()", ("a.sort()", "pass")),
        ("a += 'b'", None),
        ("a = b is not c", ("is not", "is")),
        ("a = x.amin(0)", ("amin", "amax")),
        ("# ö\na = 'ö' if b == c else d", ("==", "!=")),
    ],
)
def test_each_kind(source: str, replacement: tuple[str, str] | None) -> None:
    assert (
        replacement in replacements(source) if replacement else not replacements(source)
    )


def test_each_mutant_changes_one_place_and_has_a_key_of_its_own() -> None:
    mutants = mutants_of("scale.py", "a = 0 + 0\nb = 0 + 0\n")
    assert (
        len({mutant.apply("a = 0 + 0\nb = 0 + 0\n") for mutant in mutants})
        == len(mutants)
        == 6
    )
    assert len({mutant.key for mutant in mutants}) == 6


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_that_passes_without_it_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "scale.py").write_text(SOURCE, "utf-8")
    (tmp_path / "test_scale.py").write_text(
        "from scale import scale\n\n"
        "def test_broken():\n    assert False\n\n"
        "def test_scale():\n    assert scale(127.0) == 1.0\n",
        "utf-8",
    )
    copy = Copy(tmp_path, ["--rootdir=.", "-c", "/dev/null"])
    tests = ["test_scale.py::test_broken", "test_scale.py::test_scale"]
    by_text = {mutant.text: mutant for mutant in mutants_of("scale.py", SOURCE)}
    assert copy.verdict(by_text["/"], tests) == ("killed", "test_scale.py::test_scale")
    assert copy.verdict(by_text["1000.0"], tests) == ("survived", "")
    assert (tmp_path / "scale.py").read_text("utf-8") == SOURCE
