"""Fixtures shared by all tests. Nothing here changes a global default: seeds and threads are given back after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LOW_DTYPES = [torch.float16, torch.bfloat16]


def short_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``: a readable test id."""
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator with a fixed seed. Draw on the CPU and move, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=DTYPES, ids=short_name)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every floating dtype that torchq accepts."""
    return request.param


@pytest.fixture(params=LOW_DTYPES, ids=short_name)
def low_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The 16-bit dtypes: their arithmetic must be done in float32."""
    return request.param


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One torch thread per test process: the tensors are small, and pytest-xdist already keeps every core busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Seed torch's default generator (initial weights come from it) and give its state back, so that test order cannot matter."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves global state behind: default dtype, grad mode, or a patch that still swaps new modules."""
    yield
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    probe = nn.Sequential(nn.Linear(1, 1, device="meta"))
    assert type(probe[0]) is nn.Linear
