"""Help and refusals load no torch, and what they name is what torchq has."""

import subprocess
import sys
from pathlib import Path

import pytest

import torchq
from torchq.calib import methods
from torchq.cli.main import COMMANDS
from torchq.cli.names import METHODS, READER, RECIPES, TARGETS
from torchq.cli.run import RUNS
from torchq.runtime import reference_runtime

ROOT = Path(__file__).parents[2]
CODE = """
import contextlib, io, sys
from torchq.cli.main import COMMANDS, main

def answer(*argv):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code
    return code, len(shown.getvalue())

answers = [answer(), answer("--help"), answer("--version")]
answers += [answer(command, "--help") for command in COMMANDS]
assert all(code in (0, None) and size > 10 for code, size in answers), answers
refusals = [answer("quantise"), answer("quantize", "--target", "tensorflow")]
assert all(code == 2 and size > 10 for code, size in refusals), refusals
print(len(answers), sorted(set(sys.modules) & {"torch", "numpy", "tqdm"}))
"""


def test_help_loads_no_torch() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split() == [str(3 + len(COMMANDS)), "[]"]


def test_names_in_help_are_those_of_torchq() -> None:
    """A new name is entered in torchq/cli/names.py, of a runtime in torchq/runtimes/names.txt."""
    assert tuple(torchq.recipes.RECIPES) == RECIPES
    assert methods() == METHODS
    assert torchq.targets() == TARGETS
    assert reference_runtime().name == READER


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_carried_out_by_its_function(command: str) -> None:
    assert RUNS[command].__name__ == f"run_{command}"
    assert COMMANDS.keys() == RUNS.keys()
