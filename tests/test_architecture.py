"""The import contracts hold, and the house rules that can be read off the text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import architecture as rules
from tests.architecture import Source

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE = 700  # lines
MAX_FUNCTION = 40  # lines of code, the docstring not counted


@pytest.fixture(scope="module")
def package() -> dict[str, Source]:
    return rules.read_package(ROOT / "torchq")


@pytest.fixture(scope="module")
def everything(package: dict[str, Source]) -> dict[str, Source]:
    tests, benchmarks = (rules.read_package(ROOT / name) for name in ("tests", "benchmarks"))
    return {**package, **tests, **benchmarks}


def test_import_contracts_hold() -> None:
    """Run ``lint-imports`` over the contracts in pyproject.toml."""
    pytest.importorskip("importlinter")
    program = "import sys; from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_file_changes_the_class_of_objects(package: dict[str, Source]) -> None:
    assert rules.assigning_class(package) == ["torchq.nn.convert"]


def test_files_are_short(everything: dict[str, Source]) -> None:
    assert rules.long_files(everything, MAX_FILE) == []


def test_functions_are_short(everything: dict[str, Source]) -> None:
    assert rules.long_functions(everything, MAX_FUNCTION) == []


# --- the rules themselves: each must catch the snippet written for it ---------------------------


def module(text: str) -> dict[str, Source]:
    """Return a package of one module with this text."""
    return {"torchq.nn.sample": Source("torchq.nn.sample", text)}


Rule = Callable[[dict[str, Source]], list[str]]


def at_most_three(rule: Callable[[dict[str, Source], int], list[str]]) -> Rule:
    """Return the rule with a limit of three lines."""
    return lambda modules: rule(modules, 3)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.assigning_class, "def f(module, cls):\n    module.__class__ = cls"),
        (rules.assigning_class, "def f(m, cls):\n    object.__setattr__(m, '__class__', cls)"),
        (at_most_three(rules.long_files), "a = 1\n" * 4),
        (at_most_three(rules.long_functions), "def f():\n    a = 1\n    b = 2\n    return a + b"),
    ],
)
def test_each_rule_catches_its_offender(rule: Rule, text: str) -> None:
    assert len(rule(module(text))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.assigning_class, "def f(a, b):\n    return a.__class__ is b.__class__"),
        (at_most_three(rules.long_functions), "def f():\n    '''One.\n\n    Two.'''\n    return 1"),
    ],
)
def test_rules_leave_good_code_alone(rule: Rule, text: str) -> None:
    assert rule(module(text)) == []
