"""Programs that run in several processes of torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

__all__ = ["needs_gloo", "run_ranks"]

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo here"
)


def run_ranks(script: Path, folder: Path, count: int = 2) -> None:
    """Run ``script FOLDER`` in some gloo processes with one thread each."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch.append(f"--nproc-per-node={count}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script), str(folder)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
