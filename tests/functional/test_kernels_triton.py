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


def run(interpret: str, folder: Path, *options: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    # NumPy, which the interpreter computes with, warns of the overflows and NaN that the cases
    # contain on purpose.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::RuntimeWarning", f"--basetemp={folder}/base", *options]
    command += ["triton_kernels.py"]
    done = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("-m", "slow"), marks=pytest.mark.slow)],
    ids=["sample", "rest"],
)
def test_interpreted_on_the_cpu(options: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    assert " passed" in run("1", tmp_path, *options)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: the kernels are not compiled here"
)
def test_compiled_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert "skipped" not in run("0", tmp_path, "--slow")
