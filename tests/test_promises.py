"""Each promise to users has tests, and each of these exists; promises.txt lists them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TEXT = (FOLDER / "promises.txt").read_text(encoding="utf-8")
PLACE = re.compile(r"([\w/]*(?:\.py)?)::(\w+)(?:\[(.+)\])?")


@cache
def defined(file: str) -> set[str]:
    """Return the names that a file defines; none where there is no file."""
    path = FOLDER / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    targets = [
        t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets
    ]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


@cache
def slow(file: str) -> set[str]:
    """Return the names of the tests of a file that the default run leaves out."""
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marks = {node.name: map(ast.unparse, node.decorator_list) for node in functions}
    whole = re.search(r"^pytestmark = .*\bslow\b", ast.unparse(tree), re.MULTILINE)
    return {name for name in marks if whole or "pytest.mark.slow" in marks[name]}


def promises(text: str) -> dict[str, list[str]]:
    """Return what stands below each promise."""
    actual: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(" "):
            actual[list(actual)[-1]] += line.split()
        elif line and not line.startswith("#"):
            assert re.fullmatch(r"[\w.-]+: .+\.", line), line
            assert line.partition(":")[0] not in {
                name.partition(":")[0] for name in actual
            }, line
            actual[line] = []
    return actual


def gaps(text: str) -> list[str]:
    """Return one line for each promise without a test, and for each test that does not run."""
    missing = []
    for promise, places in promises(text).items():
        file = ""
        if not any("::test_" in place for place in places):
            missing.append(f"{promise} has no test")
        for place in places:
            match = PLACE.fullmatch(place)
            assert match, place
            file = match[1] or file
            case = match[3] or ""
            if match[2] not in defined(file):
                missing.append(f"{promise} names {file}::{match[2]}, which is missing")
            elif match[2] in slow(file):
                missing.append(f"{promise} names {file}::{match[2]}, which is slow")
            elif case not in (FOLDER / file).read_text(encoding="utf-8"):
                missing.append(
                    f"{promise} names the case {case}, which is not in {file}"
                )
    return missing


def test_every_promise_is_held_by_tests_that_exist() -> None:
    missing = gaps(TEXT)
    assert not missing, "\n".join(missing)
    names = {promise.partition(":")[0] for promise in promises(TEXT)}
    assert names >= {f"S{number}" for number in range(1, 38)}


@pytest.mark.slow
def test_slow() -> None:
    """Be a slow test that the next one promises."""
    assert slow("test_promises.py") == {"test_slow"}


def test_gaps_are_found() -> None:
    here = "test_promises.py::test_gaps_are_found"
    assert gaps(f"a: Held.\n  {here} {here}[Held]\n") == []
    assert gaps(f"a: Held.\n  {here} ::test_gone\n")[0].endswith(
        "test_gone, which is missing"
    )
    assert gaps("a: Held.\n  gone.py::test_it\n")[0].endswith(
        "gone.py::test_it, which is missing"
    )
    assert gaps("a: Held.\n  test_promises.py::test_slow\n")[0].endswith(
        "test_slow, which is slow"
    )
    assert gaps(f"a: Held.\n  {here}[{'of'}-table]\n")[0].endswith(
        "not in test_promises.py"
    )
    assert gaps("a: Held.\n  test_promises.py::FOLDER\n") == ["a: Held. has no test"]
