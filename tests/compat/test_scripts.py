"""Scripts written for pytorch-quantization run to the end and find what they should."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.processes import run_code
from tests.roads.end import run_file
from torchq.compat.__main__ import main

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).resolve().parents[2]
OLD = "pytorch_quantization"


class Run:
    """Runs a script in this process, with the old names installed, and returns its report.

    Attributes:
        names: of the script that was run last.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.names: dict[str, Any] = {}

    def __call__(self, name: str, *arguments: str) -> dict[str, Any]:
        self._patch.setattr(sys, "argv", [name, *arguments])
        self._patch.syspath_prepend(str(SCRIPTS))
        self._patch.delitem(sys.modules, "common", raising=False)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.names = runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        report: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        return report


@pytest.fixture
def run(legacy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


@pytest.mark.parametrize(
    ("calibrator", "methods"),
    [
        ("max", ["max"]),
        ("histogram", ["mse", "entropy", "percentile99.9", "percentile99.99"]),
    ],
)
def test_resnet_flow(
    run: Run, tmp_path: Path, calibrator: str, methods: list[str]
) -> None:
    report = run("resnet_flow.py", "--calibrator", calibrator, "--out", str(tmp_path))
    assert report["float"] > 0.95
    assert list(report["calibrated"]) == methods
    # Of 64 images in four classes, INT8 may cost a few, and a broken range costs far more.
    assert all(accuracy > 0.9 for accuracy in report["calibrated"].values())
    assert report["finetuned"] > 0.9


def test_detector_flow(run: Run, tmp_path: Path) -> None:
    report = run("detector_qat.py", "--out", str(tmp_path))
    assert report["ignored"] == ["model.0.conv", "head"]
    assert report["off"] == 0.0
    assert all(0 < distance < 1e-3 for distance in report["distance"].values())
    assert report["lidar"] == [1, 1, 1, 1, 2]
    parts = ("lidar._weight_quantizer", "cat._input_quantizer", "add._input1_quantizer")
    assert {f"{part}._amax" for part in parts} <= set(report["keys"])
    assert report["losses"][-1] < report["losses"][0]
    assert report["half"] == "torch.float32"


# torch.jit is deprecated, and its tracer warns of sizes.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_vgg_flow(run: Run, tmp_path: Path) -> None:
    report = run("vgg_flow.py", "--out", str(tmp_path))
    assert report["float"] > 0.95
    assert report["calibrated"] == report["resumed"] > 0.9
    assert report["finetuned"] > 0.9
    # An operator for each input and weight of three convolutions, two linear layers and a pool.
    assert (report["per_tensor"], report["per_channel"], report["python"]) == (6, 5, 0)
    # Torch's operators multiply by reciprocals, and log-probabilities are of the size of 1.
    assert report["off"] < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_tensor", [False, True])
def test_vit_flow(run: Run, tmp_path: Path, per_tensor: bool) -> None:
    flags = ["--quant-per-tensor"] if per_tensor else []
    report = run("vit_flow.py", "--out", str(tmp_path), *flags)
    assert report["float"] > 0.95
    assert report["calibrated"] > 0.9
    assert report["finetuned"] > 0.9
    assert all(before > 1.0 for before in report["gelu"])
    assert report["reloaded"]
    assert report["traced"]
    assert report["codes"] == 0
    assert report["qkv"] == (1 if per_tensor else 3)


def test_efficientnet_flow(run: Run, tmp_path: Path) -> None:
    report = run("efficientnet_flow.py", "--out", str(tmp_path))
    assert report["float"] > 0.95
    assert report["left"] == report["keys"] == 0
    assert report["quantizers"] == 33
    results = (report["calibrated"], report["finetuned"], report["averaged"])
    assert min(results) > 0.9


@dataclass(frozen=True)
class Road:
    """A script, the file that it writes for TensorRT, and the float network that it begins with.

    Attributes:
        script: its name.
        file: what it writes.
        pairs: how many pairs the file has.
        build: returns the network in float, from the names of the script.
        inputs: returns an example, from the same.
        left: patterns of what the script leaves in float.
        share: of the multiply-adds, what it leaves on integers at least.
    """

    script: str
    file: str
    pairs: int
    build: Callable[[dict[str, Any]], nn.Module]
    inputs: Callable[[dict[str, Any]], Any] = lambda names: next(names["data"](1))[0]
    left: tuple[str, ...] = ()
    share: float = 1.0


ROADS = {
    "ResNet": Road("resnet_flow.py", "model.onnx", 19, lambda names: names["Net"]()),
    "YOLO and BEV": Road(
        "detector_qat.py",
        "qat.onnx",
        25,
        lambda names: names["Model"](),
        lambda names: next(names["batches"](1)),
        ("model.0.*", "head"),
        0.89,
    ),
    "EfficientNet": Road(
        "efficientnet_flow.py",
        "efficientnet.onnx",
        33,
        lambda names: names["build"](quantize=False),
    ),
    "ViT": Road(
        "vit_flow.py",
        "vit.onnx",
        34,
        lambda names: restored(names["VisionTransformer"]()),
        left=("head", "patches"),
        share=0.87,
    ),
    "VGG16": Road("vgg_flow.py", "vgg.ts", 11, lambda names: names["VGG"]()),
}


def restored(model: nn.Module) -> nn.Module:
    torchq.restore_(model)
    return model


class File(nn.Module):
    """An ONNX file in place of its model, run in calls of the batch that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        inputs = pytest.importorskip("onnx").load(str(path)).graph.input
        self.names = [entry.name for entry in inputs]
        self.batch: int = inputs[0].type.tensor_type.shape.dim[0].dim_value

    def forward(self, *inputs: Tensor) -> Tensor:
        size = self.batch or len(inputs[0])
        calls = zip(*(tensor.split(size) for tensor in inputs), strict=True)
        feeds = (dict(zip(self.names, call, strict=True)) for call in calls)
        return torch.cat([run_file(self.path, feed)[0] for feed in feeds])


def as_onnx(path: Path, example: Tensor) -> Path:
    """Return a file as ONNX: that of torch.jit, as torch itself exports it."""
    if path.suffix == ".onnx":
        return path
    written = path.with_suffix(".onnx")
    torch.onnx.export(
        torch.jit.load(path), (example,), written, opset_version=13, dynamo=False
    )
    return written


# The scripts call the TorchScript exporter, which torch deprecates; its warnings are not tested.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(ROADS))
def test_road_of_each_script(run: Run, tmp_path: Path, name: str) -> None:
    """The file has the loss of its model, and TensorRT has integers for what its plan says.

    TensorRT fuses norms behind quantized layers by itself, so the file is read by its rule.
    """
    onnx = pytest.importorskip("onnx")
    start = time.process_time()
    road = ROADS[name]
    report = run(road.script, "--out", str(tmp_path), "--onnx")
    names = run.names
    example = road.inputs(names)
    path = as_onnx(tmp_path / road.file, example)
    nodes = [node.op_type for node in onnx.load(str(path)).graph.node]
    assert (
        nodes.count("QuantizeLinear") == nodes.count("DequantizeLinear") == road.pairs
    )

    found = torchq.inspect_onnx(path, target="tensorrt").coverage
    assert found is not None and found.share is not None
    assert found.share >= road.share
    planned = torchq.plan(
        road.build(names).eval(),
        torchq.recipes.int8(pooling=True),
        target="tensorrt",
        example=example,
        exclude=road.left,
    ).share
    assert planned is not None
    assert found.share == pytest.approx(planned.quantized, abs=1e-6)

    losses = report["loss"]
    file = File(path) if path.suffix == ".onnx" else torch.jit.load(path)
    outputs: list[Tensor] = []
    with file.register_forward_hook(lambda *call: outputs.append(call[-1])):
        of_file = names["loss"](file)
    simulated = torch.load(tmp_path / "outputs.pt")
    off = (torch.cat(outputs) - simulated).norm() / simulated.norm()
    metrics = f"{losses['float']:.4f} float / {losses['simulation']:.4f} simulation"
    lines = len((SCRIPTS / road.script).read_text(encoding="utf-8").splitlines())
    seconds = time.process_time() - start
    print(
        f"\nscript {name}: {found.share:.1%} on integers by the rule of TensorRT, loss {metrics} / "
        f"{of_file:.4f} file\n  {lines} lines of the script, {seconds:.0f} s of processor time"
    )
    # Values at ties between two codes move outputs by 1e-3, a scale off by a tenth by 4e-3 or more.
    assert off < 3e-3
    assert of_file == pytest.approx(losses["simulation"], rel=1e-2)


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run ``python -m torchq.compat`` in this process; what it prints."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("PYTHONPATH", "before")

    def call(*arguments: str) -> str:
        main(arguments)
        return capsys.readouterr().out

    return call


ARGUMENTS = """
import sys
from pathlib import Path
from pytorch_quantization import nn as quant_nn

Path(sys.argv[2], "model.pth").touch()
print(__name__, sys.argv[1:2], quant_nn.__name__)
"""


def test_a_script_runs_unchanged_from_the_command_line(
    command_line: Any, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(ARGUMENTS, encoding="utf-8")
    printed = command_line(
        str(tmp_path / "script.py"),
        "--out",
        str(tmp_path),
    )
    assert printed == f"__main__ ['--out'] torchq.compat.{OLD}.nn\n"
    assert (tmp_path / "model.pth").exists()


EXPORTING = """
import torch
torch.onnx.export("net", f="file")
torch.onnx.export("net", f="file", dynamo=True)
"""


def test_exports_of_a_script_take_the_older_exporter(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def export(model: Any, f: Any = None, *, dynamo: bool = True) -> None:
        calls.append({"model": model, "f": f, "dynamo": dynamo})

    (tmp_path / "script.py").write_text(EXPORTING, encoding="utf-8")
    monkeypatch.setattr(torch.onnx, "export", export)
    command_line(str(tmp_path / "script.py"))
    assert [call["dynamo"] for call in calls] == [False, True]
    assert torch.onnx.export is export
    (tmp_path / "failing.py").write_text("1 / 0", encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        command_line(str(tmp_path / "failing.py"))
    assert torch.onnx.export is export


def test_a_torch_without_the_older_exporter_is_named(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(EXPORTING, encoding="utf-8")
    monkeypatch.setattr(torch.onnx, "export", lambda model, f=None: None)
    with pytest.raises(RuntimeError, match="has no TorchScript exporter; expected one"):
        command_line(str(tmp_path / "script.py"))


WORKER = """
import sys
from pytorch_quantization import nn as quant_nn
from torch import multiprocessing

def work(queue):
    queue.put(type(quant_nn.QuantLinear(2, 2)).__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(), sys.argv[1:])
    process.join()
"""


@pytest.mark.slow
def test_spawned_workers_find_the_old_names(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(WORKER, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "torchq.compat"]
    command += [str(tmp_path / "spawning.py"), "--flag"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    actual = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert actual.stdout == f"torchq.compat.{OLD}.layers ['--flag']\n", actual.stderr


def test_the_search_path_alone_is_enough() -> None:
    """In a process that has installed nothing."""
    code = (
        f"import sys; sys.path.append({str(ROOT / 'torchq' / 'compat' / 'shim')!r})\n"
    )
    code += f"from importlib.metadata import version\nprint(version({OLD!r}))\n"
    code += f"from {OLD} import calib, nn\nprint(calib.__name__)\n"
    assert run_code(code) == "2.2.1\ntorchq.compat.pytorch_quantization.calib\n"


def test_a_module_instead_of_a_script(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"import sys, {OLD} as q\nprint(q.__name__, sys.argv[1:])\n"
    (tmp_path / "old_module.py").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    printed = command_line("-m", "old_module", "-x", "1")
    assert printed == "torchq.compat.pytorch_quantization ['-x', '1']\n"
    assert os.environ["PYTHONPATH"].startswith("before" + os.pathsep)


def test_the_command_line_says_how_it_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage: python -m torchq.compat" in capsys.readouterr().err
