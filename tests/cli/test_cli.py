"""The command line: what it prints, what it writes, how it fails."""

import importlib
import json
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from tests.cli.conftest import SOURCE
from tests.processes import run_code
from torchq.cli import demo, main
from torchq.cli.loading import evenly_ordered
from torchq.cli.run import RUNS

Printed = Callable[..., str]
MODEL = SOURCE[:2]
FILES = Path(__file__).parents[1] / "frontends"


def test_a_plan_is_printed_and_nothing_changes(folder: Path, printed: Printed) -> None:
    out = printed("plan", *MODEL, "--rows", "--exclude", "6")
    assert "type:torch.nn.modules.conv.Conv[123]d" in out
    assert "SKIPPED: excluded" in out
    left = [
        p.name
        for p in folder.iterdir()
        if p.suffix != ".py" and p.name != "__pycache__"
    ]
    assert left == []


#: A network whose additions no code shows: how many there are depends on the data.
LOOPING = """
import torch
from torch import nn

class Looping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > -1e9:
            x = x + self.last(x)
        return x

def build():
    return Looping()

def loader():
    return [torch.rand(2, 3, 8, 8)]
"""


def test_a_plan_with_data_is_that_of_quantize(folder: Path, printed: Printed) -> None:
    (folder / "looping_net.py").write_text(LOOPING)
    options = ["--model", "looping_net:build", "--target", "onnxruntime"]
    hint = "With --data a run shows"
    assert hint in printed("plan", *options)
    data = ["--data", "looping_net:loader"]
    planned = printed("plan", *options, *data, "--rows")
    assert hint not in planned
    assert "SKIPPED" not in planned
    done = printed("quantize", *options, *data, "--no-report", "--rows")
    rows = [row.rstrip() for row in planned.splitlines() if "quant_add" in row]
    assert rows
    assert set(rows) <= {row.rstrip() for row in done.splitlines()}


def test_quantize_saves_a_model_that_loads(folder: Path, printed: Printed) -> None:
    options = [
        "--num-batches",
        "2",
        "--save",
        "out.pt",
        "--no-fuse",
        "--calib",
        "percentile",
    ]
    assert "calibrated on 2 batches" in printed("quantize", *SOURCE, *options)
    build = importlib.import_module("user_net").build
    model = torchq.load(build(), folder / "out.pt")
    assert type(model[0]).__name__ == "QuantConv2d"
    assert all(q.calibrated for q in torchq.workflow.quantizers(model).values())


@pytest.mark.parametrize("name", ["user_net:build", "user_net:instance"])
def test_the_line_that_is_printed_loads_a_fused_model(
    name: str, folder: Path, printed: Printed
) -> None:
    """BatchNorm was folded, so the file does not fit the model of the factory as it is."""
    out = printed("quantize", "--model", name, *SOURCE[2:], "--save", "out.pt")
    assert "fused 1" in out
    code = f"{line_that_loads(out)}; print(type(model[0]).__name__, type(model[1]).__name__)"
    assert run_code(code).split() == ["QuantConv2d", "Identity"]


def line_that_loads(out: str) -> str:
    return out.split("load it with\n")[1].splitlines()[0].strip()


@pytest.mark.parametrize(
    ("network", "weights"),
    [
        ("mxnet_files/classifier-symbol.json", "mxnet_files/classifier-0000.params"),
        ("caffe_files/classifier.prototxt", "caffe_files/classifier.caffemodel"),
    ],
)
def test_weights_that_lie_elsewhere_are_named_in_the_line_that_loads(
    folder: Path, printed: Printed, network: str, weights: str
) -> None:
    name = shutil.copy(FILES / network, folder)
    # A decoy, which would be found by itself.
    (folder / Path(weights).name).write_bytes(b"")
    (folder / "elsewhere").mkdir()
    moved = str(shutil.copy(FILES / weights, folder / "elsewhere" / "renamed"))
    argv = ["quantize", str(name), "--weights", moved, *SOURCE[2:], "--save", "a.pt"]
    line = line_that_loads(printed(*argv, "--no-report"))
    assert repr(moved) in line
    assert (
        run_code(f"{line}; print(torchq.workflow.is_quantized(model))").strip()
        == "True"
    )


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


def test_no_command_prints_the_help(printed: Printed) -> None:
    assert {"demo", "quantize"} <= set(printed().split())


def test_quantize_fuses_exports_and_verifies(folder: Path, printed: Printed) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert "fused 1" in printed("quantize", *SOURCE, "--export", "out.onnx")
    operators = {node.op_type for node in onnx.load(folder / "out.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= operators
    assert "BatchNormalization" not in operators


def test_batches_may_be_mappings(folder: Path, printed: Printed) -> None:
    pytest.importorskip("onnxruntime")
    source = ["--model", "user_net:Scaled", "--data", "user_net:mappings"]
    target = ["--target", "onnxruntime", "--export", "out.onnx", "--no-report"]
    out = printed("quantize", *source, *target)
    assert "out.onnx: agrees with its model" in out
    assert (
        "another length of batch (dimension 0 of values, dimension 0 of scale)" in out
    )
    assert "nothing found" in printed("doctor", *source)


def test_warnings_are_said_without_the_place_in_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(args: object) -> int:
        text = warnings.formatwarning("is slow", UserWarning, "library.py", 3)
        sys.stdout.write(text)
        return 0

    monkeypatch.setitem(RUNS, "inspect", warn)
    Path("a.onnx").touch()
    before = warnings.formatwarning
    assert main(["inspect", "a.onnx"]) == 0
    assert capsys.readouterr().out == "torchq inspect: warning: is slow\n"
    assert warnings.formatwarning is before


def test_quantize_reads_a_folder_of_images_and_a_weights_file(
    folder: Path, printed: Printed
) -> None:
    pytest.importorskip("torchvision")
    image = pytest.importorskip("PIL.Image")
    (folder / "photos" / "cat").mkdir(parents=True)
    for i in range(3):
        image.new("L", (20 + i, 16), color=80 * i).save(
            folder / "photos" / "cat" / f"{i}.png"
        )
    state = importlib.import_module("user_net").build().state_dict()
    weights = {f"module.{k}": v + 1 for k, v in state.items()}
    torch.save({"state_dict": weights, "epoch": 3}, "w.pt")
    data = ["--data", "photos", "--batch-size", "2", "--image-size", "8", "--no-fuse"]
    out = printed("quantize", *MODEL, "--weights", "w.pt", *data, "--save", "out.pt")
    saved = torch.load("out.pt", weights_only=True)["state_dict"]
    assert torch.equal(saved["0.weight"], weights["module.0.weight"])
    assert "calibrated on 1 batch in" in out  # of two; one is compared with


def test_quantize_reads_an_onnx_file(printed: Printed) -> None:
    """A float file goes in, an INT8 file comes out; what was saved loads by the printed line."""
    model = importlib.import_module("user_net").build().eval()
    with warnings.catch_warnings():
        # Of the exporter, about itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            model, (torch.randn(8, 3, 16, 16),), "first.onnx", dynamo=False
        )
    sources = [*SOURCE[2:], "--num-batches", "1"]
    outputs = ["--export", "second.onnx", "--save", "model.pt"]
    out = printed("quantize", "first.onnx", *sources, *outputs)
    assert Path("second.onnx").stat().st_size > 0
    line = next(line for line in out.splitlines() if "torchq.from_onnx(" in line)
    names: dict[str, object] = {}
    exec(line.strip(), names)
    assert torchq.workflow.is_quantized(names["model"])


def test_recipe_from_a_json_file(printed: Printed) -> None:
    rule = torchq.Rule("*", weight=torchq.QuantDescriptor(4, axis=0))
    Path("mine.json").write_text(torchq.QuantConfig((rule,)).to_json())
    argv = ["plan", "--model", "user_net:instance", "--recipe", "mine.json", "--rows"]
    assert "weight int4 axis=0 max" in printed(*argv)


def test_python_m_torchq_is_the_same_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchq", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchq", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == f"torchq {torchq.__version__}"


def small_net() -> nn.Module:
    """Two of the blocks of the demo."""
    blocks = [demo.RepVGGBlock(1, 8), demo.RepVGGBlock(8, 16, stride=2)]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def few_digits(seed: int) -> tuple[demo.Split, demo.Split]:
    data, test = demo.load_digits(seed)
    return demo.Split(data.images[:320], data.labels[:320]), demo.Split(
        test.images[:100], test.labels[:100]
    )


def test_demo_runs_to_its_table(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("onnxruntime")
    digits = few_digits(0)
    monkeypatch.setattr(demo, "DemoNet", small_net)
    monkeypatch.setattr(demo, "load_digits", lambda seed: digits)
    assert main(["demo", "--out", "demo", "--epochs", "2"]) == 0
    out = folder / "demo"
    assert {p.name for p in out.iterdir()} == {
        *(
            "fp32.onnx",
            "int8.onnx",
            "int8.pt",
            "w4a4.onnx",
            "w4a4.pt",
            "results.json",
            "table.md",
        ),
        "report.html",
    }
    printed = capsys.readouterr()
    assert (out / "table.md").read_text().strip() in printed.out
    assert "torchq quantize --model" in printed.out.split("\n\n")[-1]
    assert "train:" not in printed.err  # a bar, which needs a terminal
    rows = {row["model"]: row for row in json.loads((out / "results.json").read_text())}
    assert len(rows) == 7
    assert (
        rows["FP32, fused"]["agreement"] == rows["FP32, as trained"]["agreement"] == 1.0
    )
    assert (
        rows["INT8 PTQ"]["agreement"] > 0.9
        and rows["INT8 in PyTorch"]["agreement"] > 0.9
    )


@pytest.mark.slow
def test_the_table_of_the_demo_shows_what_each_step_is_for() -> None:
    """Read what README's first command made, which continuous integration ran before."""
    made = os.environ.get("TORCHQ_DEMO")
    if made is None:
        pytest.skip("TORCHQ_DEMO names no folder of the demo, as .ci/run does")
    results = Path(made, "results.json").read_text()
    rows = {row["model"]: row for row in json.loads(results)}
    # The order of things holds with a wide margin.
    assert rows["FP32, fused"]["accuracy"] > 0.8
    assert (
        rows["FP32, fused"]["agreement"] == rows["FP32, as trained"]["agreement"] == 1.0
    )
    assert rows["INT8 PTQ"]["agreement"] > 0.95
    assert rows["INT8 in PyTorch"]["agreement"] > 0.95
    assert rows["W4A4 PTQ"]["accuracy"] < rows["W4A4 QAT"]["accuracy"]
    assert rows["W4A4 PTQ"]["agreement"] < rows["W4A4 gptq_"]["agreement"]
    assert rows["INT8 PTQ"]["onnx_bytes"] < rows["FP32, fused"]["onnx_bytes"] / 2.5
