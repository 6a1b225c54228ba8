"""Fixtures of every test and doctest; seeds and threads are as before when a test has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq

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
