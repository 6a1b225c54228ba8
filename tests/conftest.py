"""Fixtures that tests ask for by name; what holds for every test is in the conftest.py above."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LOW_DTYPES = [torch.float16, torch.bfloat16]


def short_name(dtype: torch.dtype) -> str:
    """Return a readable test id: ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def generator() -> torch.Generator:
    """Return a CPU generator with a fixed seed.

    Draw on the CPU and move the result, so that every device sees the same numbers.
    """
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=DTYPES, ids=short_name)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return every floating dtype that torchq accepts, one for each run of a test."""
    return request.param


@pytest.fixture(params=LOW_DTYPES, ids=short_name)
def low_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return the 16-bit dtypes, whose arithmetic must be done in float32."""
    return request.param


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the CPU, and the GPU where there is one."""
    return torch.device(request.param)
