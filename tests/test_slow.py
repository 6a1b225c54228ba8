"""What a run leaves out, that it says so, and that named tests run all the same."""

from pathlib import Path

import pytest

from tests.slow import sample_of

REPOSITORY = Path(__file__).parents[1]

INI = """
[pytest]
markers =
    slow: rarely
    integration: a whole job
    sample: of many
addopts = -p tests.slow
"""
TESTS = """
import pytest

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(6))
def test_table(number):
    pass
"""
LONG = """
import subprocess, sys, time
import pytest

def compute():
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass

@pytest.fixture
def computed():
    compute()

def test_short():
    time.sleep(0.1)

def test_long():
    compute()

def test_with_a_long_fixture(computed):
    pass

@pytest.mark.slow
def test_marked():
    compute()

@pytest.mark.integration
def test_whole_job():
    compute()
"""
LEFT_OUT = "slow tests left out: 5; --slow runs them too, -m slow runs them alone"


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with one file of tests, five of which are slow."""
    pytester.makeini(INI)
    pytester.makepyfile(TESTS)
    return pytester


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], 2),
        (["test_what_a_run_leaves_out.py"], 2),
        (["--slow"], 7),
        (["-m", "slow"], 5),
        (["-m", "not slow"], 2),
        (["test_what_a_run_leaves_out.py::test_slow"], 1),
        (["test_what_a_run_leaves_out.py::test_table[1]"], 1),
        (["test_what_a_run_leaves_out.py::test_table"], 6),
    ],
)
def test_what_a_run_leaves_out(
    folder: pytest.Pytester, arguments: list[str], passed: int
) -> None:
    result = folder.runpytest_inprocess("-p", "no:xdist", *arguments)
    result.assert_outcomes(
        passed=passed, deselected=7 - passed if "::" not in str(arguments) else 0
    )
    says = LEFT_OUT in result.stdout.str()
    assert says == (passed == 2 and "-m" not in arguments)


def test_workers_of_xdist_tell_what_they_left_out(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes of their own import tests.slow.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    result = folder.runpytest_subprocess("-n", "2")
    result.stdout.fnmatch_lines([LEFT_OUT])


@pytest.mark.parametrize("place", ["CI", "HERE"])
def test_a_long_test_fails_on_ci_unless_it_is_slow(
    pytester: pytest.Pytester, place: str
) -> None:
    pytester.makeini(INI)
    pytester.makepyfile(LONG)
    with pytest.MonkeyPatch.context() as patch:  # the same limit holds for this test
        patch.delenv("CI", raising=False)
        patch.setenv(place, "1")
        patch.setattr("tests.slow.LIMIT", 0.05)
        result = pytester.runpytest_inprocess("-p", "no:xdist", "--slow")
    failed = {"CI": 2, "HERE": 0}[place]
    result.assert_outcomes(passed=5 - failed, failed=failed)
    if failed:
        result.stdout.fnmatch_lines(
            ["*s of processor time; expected at most 0.05 s*slow"]
        )


def test_a_sample_shows_every_value_and_depends_on_names_alone() -> None:
    names = [
        f"test[{shape}-{kind}]"
        for shape in range(8)
        for kind in ("int8", "e4m3", "uint8")
    ]
    kept = sample_of(names, 8)
    assert len(kept) == 8
    assert {name[5] for name in kept} == set("01234567")
    assert {name[7:-1] for name in kept} == {"int8", "e4m3", "uint8"}
    assert sample_of(reversed(names), 8) == kept
    assert sample_of(names, 3) < kept
    assert sample_of(names[:2], 5) == set(names[:2])
