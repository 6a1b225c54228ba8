"""A user's module on the path, and what commands print and refuse."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchq.cli import main

MODULE = """
import torch
from torch import nn

READ = []

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )

instance = build()
nothing = []

def loader():
    READ.append("data")
    torch.manual_seed(1)
    return [(torch.randn(8, 3, 16, 16), torch.zeros(8)) for _ in range(4)]

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, values, scale=None):
        return self.linear(values) * (1 if scale is None else scale)

def mappings():
    return [{"values": torch.randn(8, 4), "scale": torch.rand(8, 1)} for _ in range(3)]

def small():
    return [torch.randn(2, 3, 2, 2)]

def breaks_early():
    raise KeyError("no such key")

def breaks_late():
    yield torch.randn(2, 3, 8, 8)
    raise IndexError("no such index")

def mean(output, batch):
    return output.mean()

def none(model):
    return None

def three(a, b, c):
    return 1.0

def make_number():
    return 3
"""
SOURCE = ["--model", "user_net:build", "--data", "user_net:loader"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's module ``user_net``."""
    (tmp_path / "user_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_net", raising=False)
    return tmp_path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that ends with a code, and return what it prints."""

    def run(*argv: str, code: int = 0) -> str:
        assert main(argv) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the line of a command that ends with code 2 before data is read or files written."""

    def run(*argv: str, late: bool = False) -> str:
        before = {path.name for path in Path().iterdir()} | {"__pycache__"}
        try:
            code: object = main(argv)
        except SystemExit as stopped:
            code = stopped.code
        captured = capsys.readouterr()
        assert code == 2
        assert "calibrated" not in captured.out
        assert late or not getattr(sys.modules.get("user_net"), "READ", [])
        assert {path.name for path in Path().iterdir()} <= before
        first = captured.err.splitlines()[0]
        assert re.match(rf"torchq( {argv[0]})?: error: ", first)
        return first

    return run
