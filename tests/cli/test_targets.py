"""``torchq quantize --target``: the file that it writes is the one that Python would write."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import torchq
from torchq.cli import main
from torchq.runtime import open_session
from torchq.runtimes import Qnn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

MODULE = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.last, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (x + self.second(self.first(x).relu())).relu()
        return self.head(self.last(x).relu().mean((2, 3)))

def loader():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 3, 8, 8, generator=generator), torch.zeros(2)) for _ in range(3)]
"""


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (folder / "residual_net.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "residual_net", raising=False)
    return [
        "quantize",
        "--model",
        "residual_net:Residual",
        "--data",
        "residual_net:loader",
    ]


@pytest.mark.slow
def test_nothing_runs_in_float(command: list[str], printed: Callable[..., str]) -> None:
    out = printed(*command, "--export", "m.onnx", "--target", "onnxruntime")
    assert "m.onnx: agrees" in out
    nodes = torchq.inspect_onnx("m.onnx")
    assert nodes.fallbacks == ()
    kinds = Counter(node.kind for node in nodes.integer if node.kind != "Squeeze")
    assert kinds == {
        "QLinearConv": 4,
        "QLinearAdd": 1,
        "QLinearGlobalAveragePool": 1,
        "MatMulIntegerToFloat": 1,
    }


def test_a_plan_shows_what_the_target_adds(
    command: list[str], printed: Callable[..., str]
) -> None:
    plan = ["plan", *command[1:], "--rows"]
    assert "quant_add" not in printed(*plan)
    assert "quant_add" in printed(*plan, "--target", "onnxruntime")


def test_help_lists_the_registered_targets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    assert "{" + ",".join(torchq.targets()) + "}" in capsys.readouterr().out.replace(
        "\n", ""
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [("rknn", "a target that reads ONNX"), ("executorch", "a name that ends in .pte")],
)
def test_targets_without_files_are_refused_before_data_is_read(
    target: str, expected: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    without_data = [*command[:-1], "residual_net:missing"]
    assert main([*without_data, "--export", "m.onnx", "--target", target]) == 2
    message = f"there are no ONNX files for {target}; expected {expected}"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_verify_runs_the_emulator_of_a_target_where_it_is_given(
    command: list[str], printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime takes the place of the emulator."""
    monkeypatch.setattr(
        Qnn, "emulated", lambda self, path: open_session(path, optimize=False).run
    )
    monkeypatch.setattr(Qnn, "check", lambda self: None)
    command += ["--target", "qnn", "--export", "m.onnx", "--no-report"]
    out = printed(*command, "--labels", "--verify")
    assert (
        "each layer of the file on SM8550 (emulated), given equal codes: agrees" in out
    )
    (heading,) = (line for line in out.splitlines() if "to simulation, dB" in line)
    assert heading.split()[-1] == "metric"
    assert "file on this CPU" in out


def test_verify_names_the_package_of_the_emulator_before_any_work(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    monkeypatch.setattr("torchq.runtimes.qnn.runtime._problem_of_machine", lambda: "")
    without_data = [*command[:-1], "residual_net:missing", "--target", "qnn"]
    assert main([*without_data, "--export", "m.onnx", "--verify"]) == 2
    assert "onnxruntime_qnn is not installed" in capsys.readouterr().err
    assert main([*without_data, "--export", "m.onnx"]) == 2
    assert "residual_net:missing" in capsys.readouterr().err
