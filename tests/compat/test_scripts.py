"""Scripts written for pytorch-quantization run to the end and find what they should."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchq.compat.__main__ import main

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).resolve().parents[2]
OLD = "pytorch_quantization"


@pytest.fixture
def run(
    legacy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run a script in this process, with the old names installed; its report."""

    def call(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(str(SCRIPTS))
        monkeypatch.delitem(sys.modules, "common", raising=False)
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


@pytest.mark.parametrize(
    ("calibrator", "methods"),
    [("max", ["max"]), ("histogram", ["mse", "entropy", "percentile99.9", "percentile99.99"])],
)
def test_resnet_flow(run: Any, tmp_path: Path, calibrator: str, methods: list[str]) -> None:
    report = run("resnet_flow.py", "--calibrator", calibrator, "--out", str(tmp_path))
    assert report["float"] > 0.95
    assert list(report["calibrated"]) == methods
    # Of 64 images in four classes, INT8 may cost a few, and a broken range costs far more.
    assert all(accuracy > 0.9 for accuracy in report["calibrated"].values())
    assert report["finetuned"] > 0.9


def test_detector_flow(run: Any, tmp_path: Path) -> None:
    report = run("detector_qat.py", "--out", str(tmp_path))
    assert report["ignored"] == ["model.0.conv", "head"]
    assert report["off"] == 0.0
    assert all(0 < distance < 1e-3 for distance in report["distance"].values())
    assert report["lidar"] == [1, 1, 1, 1, 2]
    parts = ("lidar._weight_quantizer", "cat._input_quantizer", "add._input1_quantizer")
    assert {f"{part}._amax" for part in parts} <= set(report["keys"])
    assert report["losses"][-1] < report["losses"][0]
    assert report["half"] == "torch.float32"


# The scripts call the TorchScript exporter, which torch deprecates; its warnings are not tested.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("script", "file", "expected"),
    [("resnet_flow.py", "model.onnx", 19), ("detector_qat.py", "qat.onnx", 25)],
)
def test_export_of_each_flow(
    run: Any, tmp_path: Path, script: str, file: str, expected: int
) -> None:
    onnx = pytest.importorskip("onnx")
    run(script, "--out", str(tmp_path), "--onnx")
    nodes = [node.op_type for node in onnx.load(str(tmp_path / file)).graph.node]
    assert nodes.count("QuantizeLinear") == nodes.count("DequantizeLinear") == expected


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_script_runs_unchanged_from_the_command_line(tmp_path: Path) -> None:
    argv = [str(SCRIPTS / "resnet_flow.py"), "--calibrator", "max", "--out", str(tmp_path)]
    found = python("-m", "torchq.compat", *argv)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["argv"] == ["--calibrator"]
    assert (tmp_path / "model.pth").exists()


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


def test_spawned_workers_find_the_old_names(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(WORKER, encoding="utf-8")
    found = python("-m", "torchq.compat", str(tmp_path / "spawning.py"), "--flag")
    assert found.stdout == f"torchq.compat.{OLD}.layers ['--flag']\n", found.stderr


def test_the_search_path_alone_is_enough(tmp_path: Path) -> None:
    lines = f"from {OLD} import calib, nn\nprint(calib.__name__)\n"
    (tmp_path / "old.py").write_text(lines, encoding="utf-8")
    shim = str(ROOT / "torchq" / "compat" / "shim")
    found = python(str(tmp_path / "old.py"), PYTHONPATH=os.pathsep.join([str(ROOT), shim]))
    assert found.stdout == "torchq.compat.pytorch_quantization.calib\n", found.stderr


def test_a_module_instead_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"import sys, {OLD} as q\nprint(q.__name__, sys.argv[1:])\n"
    (tmp_path / "old_module.py").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("PYTHONPATH", "before")
    main(["-m", "old_module", "-x", "1"])
    assert capsys.readouterr().out == "torchq.compat.pytorch_quantization ['-x', '1']\n"
    assert os.environ["PYTHONPATH"].startswith("before" + os.pathsep)


def test_the_command_line_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage: python -m torchq.compat" in capsys.readouterr().err
