"""Fixtures of every test and doctest; seeds and threads are as before when a test has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.lowering.kernel import saturates

pytest_plugins = ["pytester", "tests.slow"]
ROOT = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread in each test process: pytest-xdist already keeps every core busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Seed torch's default generator, and restore its state, so that test order cannot matter."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Let tests deploy models on CPUs without VNNI, where `deploy` warns of overflow."""
    config.addinivalue_line("filterwarnings", "ignore:deploy. this CPU has no VNNI:UserWarning")


MAY_OVERFLOW = pytest.mark.xfail(reason="this CPU has no VNNI, its kernels overflow", strict=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that run 8-bit weights in the kernels of others fail on CPUs without VNNI."""
    for item in items if saturates() else ():
        if item.get_closest_marker("eight_bit_products"):
            item.add_marker(MAY_OVERFLOW)


@pytest.fixture(autouse=True)
def results_may_overflow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail once it has deployed weights of 8 bits on a CPU without VNNI.

    The kernels of such a CPU add pairs of products in 16 bits, so what the test compares may be
    wrong there. tests/runtimes/test_saturation.py checks that `deploy` knows such CPUs and models.
    """
    if not saturates():
        return

    def asked() -> bool:
        request.node.add_marker(MAY_OVERFLOW)
        return True

    for module in ("lowering.api", "runtimes.openvino"):
        monkeypatch.setattr(f"torchq.{module}.saturates", asked)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves global state behind: a dtype, a grad mode, or an active patch."""
    yield
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    probe = nn.Sequential(nn.Linear(1, 1, device="meta"))
    assert type(probe[0]) is nn.Linear


@pytest.fixture(autouse=True)
def no_file_is_left() -> Iterator[None]:
    """Fail a test that leaves a file beside the sources: what a test writes belongs in tmp_path."""
    before = files_beside_the_sources()
    yield
    left = files_beside_the_sources() - before
    assert not left, f"the test left {sorted(left)} in {ROOT}; write to tmp_path"


def files_beside_the_sources() -> set[str]:
    """Return the names of the files in the repository's root; caches are folders."""
    return {path.name for path in ROOT.iterdir() if path.is_file()}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print reports as wide as they are, whatever window the tests run in."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace: dict[str, Any]) -> None:
    """Let examples use ``torch`` and ``torchq`` without importing them."""
    doctest_namespace.update(torch=torch, torchq=torchq)
