"""timm: its optimizer, scheduler and EMA train for ONNX Runtime, and the EMA becomes the file.

As its train script does, with branches that are dropped; its checkpoint is loaded into the network
without them, as its scripts for validation and export build it. Where ``TORCHQ_TIMM`` is the folder
of a checkout of timm, its train.py itself runs, with the lines that docs/howto.md puts into it.
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchq
from tests.roads.end import ROAD, arrives

pytestmark = ROAD

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "TORCHQ_TIMM"
#: Colours of the pictures of each class.
COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30))
#: The script of timm 0.8 waits for a GPU at the end of each batch, also where there is none.
START = (
    "import runpy, sys, torch; torch.cuda.synchronize = lambda *_: None; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def test_training_and_export(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="the road is timm's")
    from timm.models import load_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    torch.manual_seed(0)
    images = torch.rand(16, 3, 32, 32)
    labels = torch.arange(16) % 4
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    model = timm.create_model(
        "resnet10t", num_classes=4, drop_path_rate=0.1, zero_init_last=False
    )
    prepared = torchq.qat.prepare(model, batches, target="onnxruntime", progress=False)
    optimizer = create_optimizer_v2(
        prepared.param_groups, opt="sgd", lr=1e-2, momentum=0.9
    )
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
    ema = ModelEmaV3(model, decay=0.5)
    folder = str(tmp_path)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=folder)
    for epoch in range(2):
        for x, y in batches:
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        scheduler.step(epoch)
        saver.save_checkpoint(epoch, metric=float(epoch))
    loaded = timm.create_model("resnet10t", num_classes=4).eval()
    torchq.qat.prepare(loaded, batches, target="onnxruntime", progress=False)
    load_checkpoint(loaded, f"{folder}/model_best.pth.tar", use_ema=True)
    with torch.no_grad():
        assert torch.equal(loaded(images), ema.module.eval()(images))
    folds = torchq.fuse_(loaded, images[:2], progress=False)
    assert folds.applied and not folds.refused, folds

    def loss(run: object) -> float:
        outputs: Tensor = run(images)  # type: ignore[operator]
        return float(F.cross_entropy(outputs, labels))

    arrives("timm", loaded, images[:2], tmp_path / "net.onnx", loss, within=0.02)


def write_pictures(folder: Path) -> None:
    """Write noisy pictures of one colour a class, as an ImageFolder of two splits."""
    image = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "validation"):
        for number, colour in enumerate(COLOURS):
            (folder / split / f"class{number}").mkdir(parents=True)
            for count in range(8):
                noise = torch.randint(-30, 30, (40, 40, 3), generator=generator)
                pixels = (torch.tensor(colour) + noise).clamp(0, 255).byte()
                path = folder / split / f"class{number}" / f"{count}.png"
                image.fromarray(pixels.numpy()).save(path)


def with_lines_of_the_page(script: str) -> str:
    """Return timm's script with the block of docs/howto.md where the page says."""
    page = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    section = page.split("### Its train script")[1]
    lines = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert lines is not None
    place = "    optimizer = create_optimizer_v2(\n"
    assert script.count(place) == 1
    return script.replace(place, lines[1] + "\n" + place)


def train(folder: Path, experiment: str, *options: str) -> str:
    """Run a script of ``folder`` on its pictures; what it prints."""
    name = "float.py" if experiment == "float" else "quantized.py"
    command = [sys.executable, "-W", "ignore", "-c", START, name, "-c", "cpu.yaml"]
    fixed = ["--data-dir", "data", "--output", "out", "--experiment", experiment]
    sizes = [
        "--input-size",
        "3",
        "32",
        "32",
        "--num-classes",
        "4",
        "-b",
        "8",
        "-j",
        "0",
    ]
    rates = ["--lr", "0.03", "--warmup-epochs", "0", "--model-ema-decay", "0.5"]
    arguments = [
        "--model",
        "resnet10t",
        "--model-ema",
        *fixed,
        *sizes,
        *rates,
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command + arguments,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_its_own_script(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="the road is timm's")
    from timm.data import create_dataset, create_loader, resolve_data_config
    from timm.models import load_checkpoint

    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no checkout of timm")
    script = (Path(os.environ[VARIABLE]) / "train.py").read_text(encoding="utf-8")
    (tmp_path / "float.py").write_text(script)
    (tmp_path / "quantized.py").write_text(with_lines_of_the_page(script))
    (tmp_path / "cpu.yaml").write_text("device: cpu\n")
    write_pictures(tmp_path / "data")

    train(tmp_path, "float", "--epochs", "3")
    begun = ["--initial-checkpoint", "out/float/model_best.pth.tar"]
    habits = ["--drop-path", "0.1", "--clip-grad", "1", "--mixup", "0.2", "--amp"]
    habits += ["--amp-dtype", "bfloat16", "--checkpoint-hist", "2"]
    printed = train(tmp_path, "first", "--epochs", "2", *begun, *habits)
    assert "quantized: 20 quantized" in printed
    resumed = ["--resume", "out/first/last.pth.tar", "--epochs", "4"]
    train(tmp_path, "resumed", *resumed)

    model = timm.create_model("resnet10t", num_classes=4)
    config = resolve_data_config({"input_size": (3, 32, 32)}, model=model)
    names = ("input_size", "mean", "std", "interpolation", "crop_pct")
    settings = {name: config[name] for name in names}
    pictures = create_dataset("", root=str(tmp_path / "data"), split="validation")
    loader = create_loader(
        pictures, batch_size=8, num_workers=0, device=torch.device("cpu"), **settings
    )
    batches = list(loader)
    images, labels = map(torch.cat, zip(*batches, strict=True))
    torchq.qat.prepare(model, [images], target="onnxruntime", progress=False)
    folder = tmp_path / "out" / "resumed"
    load_checkpoint(model, str(folder / "model_best.pth.tar"), use_ema=True)

    def loss(run: object) -> float:
        outputs: Tensor = run(images)  # type: ignore[operator]
        return float(F.cross_entropy(outputs, labels))

    # It is the EMA that the script measured, to the digits that sums of batches leave.
    with open(folder / "summary.csv") as file:
        measured = {float(row["eval_loss"]) for row in csv.DictReader(file)}
    with torch.no_grad():
        loaded = loss(model.eval())
    assert min(abs(loaded - value) for value in measured) < 1e-5
    folds = torchq.fuse_(model, images[:2], progress=False)
    assert folds.applied and not folds.refused, folds
    arrives("timm's script", model, images[:2], tmp_path / "n.onnx", loss, within=0.02)
