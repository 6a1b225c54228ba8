"""The examples run, as a reader would start them, and say what they promise."""

from __future__ import annotations

import json
import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processes import Running, printed_by_script, run_script
from tests.rank_processes import needs_gloo

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run an example in a process and an empty folder of its own; what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str) -> str:
        return run_script(EXAMPLES / name, *arguments)

    return call


def run_as_torchrun_would(name: str) -> list[str]:
    """Return what each of two processes prints that run an example for one group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        Running(printed_by_script, EXAMPLES / name, environment={"RANK": rank, **group})
        for rank in ("0", "1")
    ]
    return [rank.result() for rank in ranks]


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


@pytest.mark.slow
@pytest.mark.eight_bit_products
def test_photos_to_a_file(run: Run, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    arguments = ("--model", "squeezenet1_1", "--size", "64", "--export", "int8.onnx")
    printed = run("ptq_photos.py", str(photos), *arguments)
    assert "of 6 photos" in printed
    assert "int8.onnx: agrees" in printed
    assert (tmp_path / "int8.onnx").stat().st_size < 2_000_000


@pytest.mark.slow
def test_training_with_ema_and_a_checkpoint(run: Run) -> None:
    pytest.importorskip("sklearn")
    printed = run("qat_training.py", "--epochs", "3")
    _, *epochs, loaded = printed.splitlines()
    assert len(epochs) == 3
    before, after = (
        float(line.split(": ")[1].split("%")[0]) for line in (epochs[-1], loaded)
    )
    assert after > 80
    assert abs(before - after) < 2


def test_yolo(run: Run) -> None:
    pytest.importorskip("ultralytics")
    printed = run("ultralytics_yolo.py", "--size", "160")
    assert "on integers" in printed


def test_vit_and_bert(run: Run) -> None:
    pytest.importorskip("transformers")
    printed = run("transformers_vit_bert.py", "--layers", "1")
    assert printed.count("saved and loaded: equal") == 2


def test_lightning(run: Run) -> None:
    pytest.importorskip("lightning")
    printed = run("lightning_training.py", "--epochs", "1")
    assert "the checkpoint is equal" in printed


@pytest.mark.slow
@needs_gloo
def test_two_processes_find_the_ranges_of_one() -> None:
    first, second = run_as_torchrun_would("distributed_calibration.py")
    assert first == "rank 0 of 2: equal to one process\n"
    assert second == "rank 1 of 2: equal to one process\n"


@pytest.mark.slow
@needs_gloo
def test_two_processes_train_one_network() -> None:
    for rank, printed in enumerate(run_as_torchrun_would("distributed_training.py")):
        right = re.search(rf"rank {rank} of 2: (\d+) of 16 right, equal", printed)
        assert right is not None
        assert int(right[1]) >= 15


@pytest.mark.slow
@pytest.mark.eight_bit_products
def test_onnx_in_onnx_out(run: Run, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )
    path = tmp_path / "float.onnx"
    with warnings.catch_warnings():
        # Most releases of torch warn of their older exporter.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (torch.rand(1, 3, 32, 32),),
            path,
            dynamo=False,
        )
    arguments = (str(path), "int8.onnx", "--photos", str(photos), "--size", "32")
    assert "agrees with its model" in run("onnx_to_onnx.py", *arguments)


@pytest.mark.slow
def test_the_layer_is_found(run: Run) -> None:
    pytest.importorskip("sklearn")
    printed = run("find_the_layer.py", "--epochs", "12", "--bits", "2")
    lines = printed.splitlines()
    few, mixed = (float(line.split()[-1].rstrip("%")) for line in (lines[1], lines[-1]))
    assert mixed > few + 5


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name
)
def test_scripts_are_short_and_listed(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 90
    assert path.name in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
    assert names
