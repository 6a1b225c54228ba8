"""The program that counts lines sees all that a user sees; a network of many layers fits."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import screens

#: More layers than a screen has lines.
BLOCKS = 21


class Block(nn.Module):
    """Layers, an addition, and a loop that a trace does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(torch.cat(list(x.split(4, 1)), 1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=generator) for _ in range(2)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the network among those whose screens are counted."""
    for function in (network, batches):
        monkeypatch.setattr(screens, function.__name__, function, raising=False)
    monkeypatch.setitem(screens.NETWORKS, "stand-in", (network, batches))
    return "stand-in"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("command", ["plan", "doctor", "report"])
def test_each_command_fits_a_screen(command: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    runs = dict(screens.commands("network", "batches", tmp_path))
    lines = screens.screen_of(runs[f"torchq {command}"])
    assert 0 < len(lines) <= screens.SCREEN, lines


@pytest.mark.usefixtures("stand_in")
def test_quantize_prints_rows_on_request_alone(tmp_path: Path) -> None:
    argv = ["quantize", "--model", "benchmarks.screens:network"]
    argv += ["--data", "benchmarks.screens:batches", "--save", str(tmp_path / "a.pt")]
    argv += ["--no-report"]
    in_short = screens.screen_of(lambda: screens.finished(argv))
    with_rows = screens.screen_of(lambda: screens.finished([*argv, "--rows"]))
    assert len(in_short) <= screens.SCREEN < len(with_rows)


@pytest.mark.slow  # 20 s of trials of tune, and an export and two verifications
def test_each_call_fits_a_screen(stand_in: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    found = dict(screens.measure(stand_in, tmp_path))
    assert {"tune", "report", "verify_onnx"} <= found.keys()
    counts = {call: len(lines) for call, lines in found.items()}
    assert max(counts.values()) <= screens.SCREEN, counts


def test_everything_on_the_screen_counts() -> None:
    def call() -> Any:
        sys.stdout.write("a line\n")
        sys.stderr.write("an error\n")
        warnings.warn("two\nlines", stacklevel=1)
        warnings.warn("of developers", DeprecationWarning, stacklevel=1)
        return "a report"

    screen = screens.screen_of(call)
    assert screen[:2] == ["a line", "an error"] and screen[-1] == "a report"
    assert "of developers" not in str(screen) and screen[3] == "lines"
