"""Runs triton_kernels.py in a process of its own.

Whether Triton interprets or compiles is fixed when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def run(interpret: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    # NumPy, which the interpreter computes with, warns of the overflows and NaN that the cases
    # contain on purpose.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::RuntimeWarning", "triton_kernels.py"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_interpreted_on_the_cpu() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    assert " passed, 1 skipped" in run("1")


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: the kernels are not compiled here"
)
def test_compiled_on_the_gpu() -> None:
    pytest.importorskip("triton")
    assert "skipped" not in run("0")
