"""What the default run leaves out: tests marked `slow`, and all but a sample of large tables.

`python -m pytest` runs what finds nearly every fault within minutes. A test is marked `slow` for
one reason: the default run has a smaller one that fails for the same kinds of faults, and this one
looks at more cases of them (a whole table, a larger network, one more exporter, a process of its
own). Nothing that is promised to users is only tested there; tests/test_promises.py checks that.

    python -m pytest -n 2            # without the slow tests
    python -m pytest -n 2 --slow     # all tests
    python -m pytest -n 2 -m slow    # the slow tests alone
    python -m pytest tests/nn/test_calls.py::test_names   # a test that is named runs, slow or not

Of a test with many cases ``@pytest.mark.sample(count)`` keeps some in the default run and marks the
others slow; :func:`sample_of` says which.

The hooks below are a plugin of pytest, which the conftest.py of the repository loads.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: How many slow tests were left out, in the process that collected them.
LEFT_OUT = pytest.StashKey[int]()
#: Seconds of processor time that a test may take on CI, with its fixtures, without being slow.
#: Whole jobs with the trainers of others, marked ``integration``, may take more: they have a run of
#: their own.
LIMIT = 15.0
#: The processor time when the setup of a test began.
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run the tests marked slow too"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out slow tests, unless an option asks for them or an argument names them."""
    mark_all_but_samples(items)
    if config.option.slow or "slow" in config.option.markexpr:
        return
    named = [argument for argument in config.args if "::" in argument]
    left_out = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and not any(is_named(item, by) for by in named)
    ]
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        slow = set(left_out)
        items[:] = [item for item in items if item not in slow]


def mark_all_but_samples(items: list[pytest.Item]) -> None:
    """Mark the cases slow that are not in the sample of their test."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tables.values():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        kept = sample_of([case.nodeid for case in cases], *marker.args)
        for case in cases:
            if case.nodeid not in kept:
                case.add_marker("slow")


def sample_of(names: Iterable[str], count: int) -> set[str]:
    """Return ``count`` names that together have as many different words as can be.

    The words of a case are the values of its parameters, so that the sample shows each of them
    before it shows one of them twice. Which of several cases is taken depends on nothing but their
    names: a table that grows keeps most of its sample.
    """
    rest = {
        name: set(re.split(r"[-\s]", name.partition("[")[2]))
        for name in sorted(names, key=lambda name: zlib.crc32(name.encode()))
    }
    kept: set[str] = set()
    shown: set[str] = set()
    while rest and len(kept) < count:
        best = max(rest, key=lambda name: len(rest[name] - shown))
        shown |= rest.pop(best)
        kept.add(best)
    return kept


def is_named(item: pytest.Item, argument: str) -> bool:
    """Return whether an argument ``file::name`` selects this test, and not just its file."""
    file, _, name = argument.partition("::")
    path, _, test = item.nodeid.partition("::")
    same_file = Path(file).resolve() == (item.config.rootpath / path).resolve()
    return same_file and (test == name or test.startswith((f"{name}[", f"{name}::")))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell pytest-xdist's process how many tests were left out here, if this is a worker of it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow_left_out"] = session.config.stash.get(
            LEFT_OUT, 0
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Read what a worker of pytest-xdist left out: every worker collects every test."""
    config: pytest.Config = node.config
    count = getattr(node, "workeroutput", {}).get("slow_left_out", 0)
    config.stash[LEFT_OUT] = max(config.stash.get(LEFT_OUT, 0), count)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(
            f"slow tests left out: {count}; --slow runs them too, -m slow runs them alone"
        )


def processor_time() -> float:
    """Return the seconds that this process and its ended children have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = processor_time()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes too long for the default run, where CI runs it."""
    yield
    seconds = processor_time() - item.stash[BEGAN]
    may_take_long = any(map(item.get_closest_marker, ("slow", "integration")))
    if seconds > LIMIT and "CI" in os.environ and not may_take_long:
        pytest.fail(
            f"the test took {seconds:.0f} s of processor time; expected at most {LIMIT:g} s. "
            "Make it smaller, or mark it slow"
        )
