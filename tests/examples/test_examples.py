"""The examples run, as a reader would start them, and say what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, folder: Path, launcher: tuple[str, ...] = ()) -> str:
    """Return what an example prints; fail if it exits with an error."""
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pieces of two photos."""
    image = pytest.importorskip("PIL.Image")
    datasets = pytest.importorskip("sklearn.datasets")
    folder = tmp_path_factory.mktemp("photos")
    for number, photo in enumerate(datasets.load_sample_images().images):
        for column in range(0, 384, 128):
            piece = image.fromarray(photo[:128, column : column + 128])
            piece.save(folder / f"{number}-{column}.png")
    return folder


@pytest.mark.eight_bit_products
def test_photos_to_a_file(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    arguments = ("--model", "squeezenet1_1", "--size", "64", "--export", "int8.onnx")
    printed = run("ptq_photos.py", str(photos), *arguments, folder=tmp_path)
    assert "of 6 photos" in printed and "int8.onnx: agrees" in printed
    assert (tmp_path / "int8.onnx").stat().st_size < 2_000_000


def test_training_with_ema_and_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = run("qat_training.py", "--epochs", "3", folder=tmp_path)
    _, *epochs, loaded = printed.splitlines()
    assert len(epochs) == 3
    before, after = (float(line.split(": ")[1].split("%")[0]) for line in (epochs[-1], loaded))
    assert after > 80 and abs(before - after) < 2


def test_yolo(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    printed = run("ultralytics_yolo.py", "--size", "160", folder=tmp_path)
    assert "on integers" in printed


def test_vit_and_bert(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = run("transformers_vit_bert.py", "--layers", "1", folder=tmp_path)
    assert printed.count("saved and loaded: equal") == 2


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    printed = run("lightning_training.py", "--epochs", "1", folder=tmp_path)
    assert "the checkpoint is equal" in printed


def test_two_processes_find_the_ranges_of_one(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    printed = run("distributed_calibration.py", folder=tmp_path, launcher=launcher)
    assert printed.count("equal to one process") == 2


def test_two_processes_train_one_network(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    printed = run("distributed_training.py", folder=tmp_path, launcher=launcher)
    # Both processes write to one pipe, so the end of one line may come behind the next line.
    found = re.findall(r"rank (\d) of 2: (\d+) of 16 right, equal", printed)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert all(int(right) >= 15 for _, right in found)


@pytest.mark.eight_bit_products
def test_onnx_in_onnx_out(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    path = tmp_path / "float.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most releases of torch warn of their older exporter
        torch.onnx.export(model.eval(), (torch.rand(1, 3, 32, 32),), path, dynamo=False)
    arguments = (str(path), "int8.onnx", "--photos", str(photos), "--size", "32")
    assert "agrees with its model" in run("onnx_to_onnx.py", *arguments, folder=tmp_path)


def test_the_layer_is_found(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = run("find_the_layer.py", "--epochs", "12", "--bits", "2", folder=tmp_path)
    lines = printed.splitlines()
    few, mixed = (float(line.split()[-1].rstrip("%")) for line in (lines[1], lines[-1]))
    assert mixed > few + 5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_scripts_are_short_and_listed(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80
    assert path.name in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
    assert names
