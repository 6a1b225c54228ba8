"""Functions that run in several processes of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import Running

__all__ = ["needs_gloo", "run_ranks"]

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="torch has no gloo here",
)


def run_ranks(function: Callable[[Path], Any], folder: Path, count: int = 2) -> None:
    """Call a function of a folder in some gloo processes with one thread each."""
    ranks = [
        Running(
            _run_rank,
            function,
            folder,
            rank,
            count,
            environment={"OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    for rank in ranks:
        rank.result()


def _run_rank(
    function: Callable[[Path], Any], folder: Path, rank: int, count: int
) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=count)
    function(folder)
