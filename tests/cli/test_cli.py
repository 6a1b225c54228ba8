"""The command line: what it prints, what it writes, how it fails."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torchq
from torchq.cli import main
from torchq.cli.loading import evenly_ordered

MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

instance = build()
def loader():
    return [(torch.randn(2, 3, 8, 8), torch.zeros(2)) for _ in range(3)]
def small():
    return [torch.randn(2, 3, 2, 2)]
nothing = []
number = 3
def make_number():
    return 3
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module ``mynet``, on the path and current."""
    (tmp_path / "mynet.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    return tmp_path


def test_dry_run_prints_the_plan_and_changes_nothing(
    user_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "--model", "mynet:build", "--dry-run", "--exclude", "5"]) == 0
    out = capsys.readouterr().out
    assert "type:torch.nn.modules.conv.Conv[123]d" in out
    assert "SKIPPED: excluded" in out
    assert [
        p.name for p in user_code.iterdir() if p.suffix != ".py" and p.name != "__pycache__"
    ] == []


def test_quantize_saves_a_model_that_loads(
    user_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "quantize",
        "--model",
        "mynet:build",
        "--data",
        "mynet:loader",
        "--num-batches",
        "2",
        "--save",
        "out.pt",
        "--no-fuse",
    ]
    assert main([*arguments, "--calib", "percentile"]) == 0
    assert "calibrated on 2 batches" in capsys.readouterr().out
    import mynet

    model = torchq.load(mynet.build(), user_code / "out.pt")
    assert type(model[0]).__name__ == "QuantConv2d"
    assert all(q.calibrated for q in torchq.workflow.quantizers(model).values())


@pytest.mark.parametrize("name", ["mynet:build", "mynet:instance"])
def test_the_line_that_is_printed_loads_a_fused_model(
    name: str, user_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BatchNorm was folded, so the file does not fit the model of the factory as it is."""
    arguments = ["--model", name, "--data", "mynet:loader", "--save", "out.pt"]
    assert main(["quantize", *arguments]) == 0
    out = capsys.readouterr().out
    assert "fused 1" in out
    line = out.split("load it with\n")[1].splitlines()[0].strip()
    code = f"{line}; print(type(model[0]).__name__, type(model[1]).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=user_code, check=False
    )
    assert done.stdout.split() == ["QuantConv2d", "Identity"], done.stderr


def test_every_part_of_a_folder_has_some_of_each_sub_folder(tmp_path: Path) -> None:
    for name in ("cat", "dog", "few"):
        (tmp_path / name).mkdir()
        for number in range(2 if name == "few" else 50):
            (tmp_path / name / f"{number:02}.png").touch()
    paths = evenly_ordered(tmp_path, seed=0)
    assert len(paths) == 102 and len(set(paths)) == 102
    assert [p.parent.name for p in paths[:20]].count("cat") in (9, 10, 11, 8)
    assert {p.parent.name for p in paths[:3]} == {"cat", "dog", "few"}
    assert paths == evenly_ordered(tmp_path, seed=0) != evenly_ordered(tmp_path, seed=1)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert {"demo", "quantize"} <= set(capsys.readouterr().out.split())


def test_quantize_fuses_exports_and_verifies(
    user_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert (
        main(
            ["quantize", "--model", "mynet:build", "--data", "mynet:loader", "--export", "out.onnx"]
        )
        == 0
    )
    operators = {node.op_type for node in onnx.load(user_code / "out.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= operators
    assert "BatchNormalization" not in operators
    assert "fused 1" in capsys.readouterr().out


def test_quantize_reads_a_folder_of_images_and_a_weights_file(
    user_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision")
    image = pytest.importorskip("PIL.Image")
    (user_code / "photos" / "cat").mkdir(parents=True)
    for i in range(3):
        image.new("L", (20 + i, 16), color=80 * i).save(user_code / "photos" / "cat" / f"{i}.png")
    import mynet

    weights = {f"module.{k}": v + 1 for k, v in mynet.build().state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 3}, "w.pt")
    data = ["--data", "photos", "--batch-size", "2", "--image-size", "8"]
    assert (
        main(
            [
                "quantize",
                "--model",
                "mynet:build",
                "--weights",
                "w.pt",
                *data,
                "--save",
                "out.pt",
                "--no-fuse",
            ]
        )
        == 0
    )
    saved = torch.load("out.pt", weights_only=True)["state_dict"]
    assert torch.equal(saved["0.weight"], weights["module.0.weight"])
    assert "calibrated on 1 batch in" in capsys.readouterr().out  # of two; one is compared with


def test_quantize_reads_an_onnx_file(
    user_code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A float file goes in, an INT8 file comes out; what was saved loads by the printed line."""
    sources = ["--data", "mynet:loader", "--num-batches", "1"]
    model = importlib.import_module("mynet").build().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the exporter, about itself
        torch.onnx.export(model, (torch.randn(2, 3, 8, 8),), "first.onnx", dynamo=False)
    outputs = ["--export", "second.onnx", "--save", "model.pt"]
    assert main(["quantize", "first.onnx", *sources, *outputs]) == 0
    printed = capsys.readouterr().out
    assert Path("second.onnx").stat().st_size > 0
    line = next(line for line in printed.splitlines() if "torchq.from_onnx(" in line)
    names: dict[str, object] = {}
    exec(line.strip(), names)
    assert torchq.workflow.is_quantized(names["model"])


def test_recipe_from_a_json_file(user_code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = torchq.Rule("*", weight=torchq.QuantDescriptor(4, axis=0))
    Path("mine.json").write_text(torchq.QuantConfig((rule,)).to_json())
    assert (
        main(["quantize", "--model", "mynet:instance", "--recipe", "mine.json", "--dry-run"]) == 0
    )
    assert "weight int4 axis=0 max" in capsys.readouterr().out


ERRORS = [
    (["--model", "nowhere:build"], "cannot import nowhere"),
    (["--model", "mynet:missing"], "mynet has no missing"),
    (["--model", "mynet"], "expected package.module:name"),
    (["--model", "mynet:make_number"], "got a int; expected a torch.nn.Module"),
    (["--model", "mynet:build", "--weights", "no.pt"], "--weights no.pt: no such file"),
    (
        ["--model", "mynet:build", "--recipe", "int5"],
        "unknown recipe 'int5'; expected one of: .*'int8'",
    ),
    (["--model", "mynet:build", "--recipe", "no.json"], "--recipe no.json: no such file"),
    (["--model", "mynet:build"], "--data is missing"),
    (["--model", "mynet:build", "--data", "nofolder"], "no such folder"),
    (["--model", "mynet:build", "--data", "mynet:nothing"], "got no batch"),
    (["--model", "mynet:build", "--data", "mynet:make_number"], "expected an iterable of batches"),
    (
        ["--model", "mynet:build", "--data", "mynet:loader", "--exclude", "head.*"],
        "'head.\\*' matches no module",
    ),
    (
        ["--model", "mynet:build", "--data", "mynet:small"],
        r"--data mynet:small: the model fails on a batch of shape \(2, 3, 2, 2\) \(RuntimeError",
    ),
    (["--model", "mynet:build", "--device", "abacus"], "--device abacus: "),
    (["--model", "torchvision:resnet1"], "no such model; expected one like"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=[text[:20] for _, text in ERRORS])
def test_errors_are_one_line_and_exit_2(
    user_code: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    if arguments[1].startswith("torchvision:"):
        pytest.importorskip("torchvision")
    assert main(["quantize", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchq quantize: error: ")
    assert re.search(text, error), error


def test_python_m_torchq_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchq", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"torchq {torchq.__version__}"


def test_demo_runs_to_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("onnxruntime")
    assert main(["demo", "--out", str(tmp_path), "--epochs", "3"]) == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    assert {p.name for p in tmp_path.iterdir()} == {
        *("fp32.onnx", "int8.onnx", "int8.pt", "w4a4.onnx", "w4a4.pt", "results.json", "table.md"),
        "report.html",
    }
    printed = capsys.readouterr()
    assert (tmp_path / "table.md").read_text().strip() in printed.out
    assert "torchq quantize --model" in printed.out.split("\n\n")[-1]
    assert "train:" not in printed.err  # a bar, which needs a terminal
    # Three epochs: far from the full demo, but the order of things holds with a wide margin.
    assert rows["FP32, fused"]["accuracy"] > 0.8
    assert rows["FP32, fused"]["agreement"] == rows["FP32, as trained"]["agreement"] == 1.0
    assert rows["INT8 PTQ"]["agreement"] > 0.95
    assert rows["INT8 in PyTorch"]["agreement"] > 0.95
    assert rows["W4A4 PTQ"]["accuracy"] < rows["W4A4 QAT"]["accuracy"]
    assert rows["INT8 PTQ"]["onnx_bytes"] < rows["FP32, fused"]["onnx_bytes"] / 2.5
