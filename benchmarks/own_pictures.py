"""How near is a quantized MobileNetV2 with real weights to the float one, on pictures of yours?

Neither weights nor pictures come with torchq. ``--weights`` is a state dict of torchvision's
MobileNetV2 for ImageNet, such as mobilenet_v2-b0353104.pth, and ``--pictures`` a folder of JPEG and
PNG files, which is searched through; a run without one of both says so, and measures nothing.
A draw shuffles the files: the first ones calibrate, all others judge. With ``--views`` above 1 each
picture that judges also gives random crops, as those of training.

A cell holds the share of answers of the float network, the mean divergence from its probabilities
in nats, the ratio of signal to noise of the outputs, and the seconds of all calls after
``quantize_``: processor time, and by the clock. ``confidence`` is the mean of the float network's
largest probability: where it is unsure, the least change turns its answer. So ``clear`` is the
share of answers among pictures where its answer is at least twice as probable as any other, and
``clear_share`` how many these are. Rows of ``bfloat16`` are the float network in
this type, for which no quantizer is to blame. With ``--out`` a run goes on after the cells that
the file has already.

Example:
    python -m benchmarks.own_pictures --weights FILE --pictures FOLDER --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

import torchq
from benchmarks import figures
from benchmarks.accuracy_peers import PACKAGES, PEERS
from benchmarks.harness import Reporter, decibels, finished_rows, parse, parser
from torchq.recipes import int8, integer

Run = Callable[[Tensor], Tensor]

_ENDINGS = {".jpg", ".jpeg", ".png"}
_KEY = ("recipe", "target", "method", "draw")
_BATCH = 32
#: How many times as probable as the second a clear answer is at least.
_CLEAR = 2.0
#: The share of a picture that a random crop shows at least.
_LEAST_CROP = 0.35

RECIPES: dict[str, Callable[[], torchq.QuantConfig]] = {
    "int8": int8,
    "w4a8": lambda: integer(4, 8, first_last=8),
    "w4a8, mse inputs": lambda: integer(
        4, 8, first_last=8, unsigned="auto", input_method="mse"
    ),
}


def calibrated(model: nn.Module, batches: list[Tensor]) -> None:
    """Calibrate, untouched."""
    torchq.calibrate(model, batches, progress=False)


def whole_ranges(model: nn.Module, batches: list[Tensor]) -> None:
    """Calibrate with ranges that hold the largest value of all pictures."""
    torchq.calibrate(model, batches, method="max", progress=False)


def evened(model: nn.Module, batches: list[Tensor]) -> None:
    """Calibrate with channels of one size in front of depthwise layers."""
    torchq.ptq.equalize_depthwise_(model, batches, progress=False)
    torchq.calibrate(model, batches, progress=False)


def rounded(model: nn.Module, batches: list[Tensor]) -> None:
    """Calibrate, and round the weights by their layers' outputs."""
    torchq.calibrate(model, batches, correct=False, progress=False)
    torchq.ptq.gptq_(model, batches, progress=False)


def evened_and_rounded(model: nn.Module, batches: list[Tensor]) -> None:
    """Do both: channels of one size, and weights rounded by their layers' outputs."""
    torchq.ptq.equalize_depthwise_(model, batches, progress=False)
    rounded(model, batches)


#: What runs after quantize_.
METHODS: dict[str, Callable[[nn.Module, list[Tensor]], None]] = {
    "untouched": calibrated,
    "whole ranges": whole_ranges,
    "equalize_depthwise_": evened,
    "gptq_": rounded,
    "equalize_depthwise_, gptq_": evened_and_rounded,
}
#: Types that the float network computes in, in place of quantization.
TYPES = {"bfloat16": torch.bfloat16}
#: Recipe, target and method of what is measured.
SETTINGS = [
    ("int8", "none", "untouched"),
    ("int8", "onnxruntime", "untouched"),
    ("int8", "openvino", "untouched"),
    ("int8", "onnxruntime", "whole ranges"),
    ("int8", "openvino", "whole ranges"),
    ("int8", "none", "equalize_depthwise_"),
    ("int8", "onnxruntime", "equalize_depthwise_"),
    ("w4a8", "none", "untouched"),
    ("w4a8", "none", "gptq_"),
    ("w4a8, mse inputs", "none", "untouched"),
    ("w4a8, mse inputs", "none", "gptq_"),
    ("w4a8, mse inputs", "none", "equalize_depthwise_, gptq_"),
]


@dataclass(frozen=True)
class Task:
    """A fused float network, batches to calibrate on, and pictures to judge by."""

    model: nn.Module
    batches: list[Tensor]
    judged: Tensor
    expected: Tensor


def task(options: argparse.Namespace, draw: int) -> Task:
    """Return the network with its weights, and the pictures of a draw."""
    model = torchvision.models.mobilenet_v2()
    model.load_state_dict(torch.load(options.weights, weights_only=True))
    paths = pictures(options.pictures)
    random.Random(draw).shuffle(paths)
    to_tensor = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    whole = v2.Compose([v2.Resize(256), v2.CenterCrop(224), *to_tensor])
    crop = v2.RandomResizedCrop(224, scale=(_LEAST_CROP, 1.0))
    view = v2.Compose([crop, v2.RandomHorizontalFlip(), *to_tensor])
    torch.manual_seed(draw)
    views = [whole] + [view] * (options.views - 1)
    read = [Image.open(path).convert("RGB") for path in paths]
    calibration = torch.stack([whole(one) for one in read[: options.calibration]])
    judging = read[options.calibration :][: options.judged]
    judged = torch.stack([show(one) for one in judging for show in views])
    torchq.fuse_(model.eval(), calibration[:4], progress=False)
    return Task(model, list(calibration.split(_BATCH)), judged, outputs(model, judged))


def pictures(folder: Path | None) -> list[Path]:
    """Return the files of a folder that are pictures, in order; none where there is no folder."""
    if folder is None:
        return []
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _ENDINGS)


def outputs(run: Run, images: Tensor) -> Tensor:
    """Return the outputs for images."""
    with torch.no_grad():
        return torch.cat([run(batch) for batch in images.split(_BATCH)])


def nearness(expected: Tensor, found: Tensor) -> dict[str, float]:
    """Return how near outputs are to those of the float network."""
    log_chances = expected.log_softmax(1)
    difference = log_chances - found.log_softmax(1)
    divergence = (difference * log_chances.exp()).sum(1).mean()
    same = (expected.argmax(1) == found.argmax(1)).float()
    first, second = log_chances.topk(2, dim=1).values.unbind(1)
    clear = first - second >= math.log(_CLEAR)
    return {
        "same": round(100 * float(same.mean()), 2),
        "clear": round(100 * float(same[clear].mean()), 2),
        "clear_share": round(100 * float(clear.float().mean()), 1),
        "kl": round(float(divergence), 4),
        "decibels": decibels(found, expected),
        "confidence": round(float(log_chances.exp().amax(1).mean()), 3),
    }


def measure(task: Task, recipe: str, target: str, method: str) -> dict[str, Any]:
    """Quantize a copy of the network, and return the figures of a cell."""
    model = copy.deepcopy(task.model)
    torchq.quantize_(
        model,
        RECIPES[recipe](),
        target=None if target == "none" else target,
        example=task.batches[0][:1],
        progress=False,
    )
    processor = time.process_time()
    clock = time.perf_counter()
    METHODS[method](model, task.batches)
    seconds = {
        "seconds": round(time.process_time() - processor, 1),
        "clock": round(time.perf_counter() - clock, 1),
    }
    return {**nearness(task.expected, outputs(model, task.judged)), **seconds}


def measure_type(task: Task, name: str) -> dict[str, Any]:
    """Return the figures of the float network in another type."""
    model = copy.deepcopy(task.model).to(TYPES[name])
    found = outputs(lambda x: model(x.to(TYPES[name])).float(), task.judged)
    return {**nearness(task.expected, found), "seconds": 0.0}


def measure_peer(task: Task, peer: str) -> dict[str, Any]:
    """Return the figures of the quantizer of others, or why there are none."""
    processor = time.process_time()
    try:
        run = PEERS[peer](copy.deepcopy(task.model), task.batches)
        seconds = round(time.process_time() - processor, 1)
        found = nearness(task.expected, outputs(run, task.judged))
    except ImportError:
        return {"missing": "not installed"}
    except Exception as error:  # the peer's own limit is a row of the table
        return {"missing": f"failed: {type(error).__name__}", "error": str(error)[:200]}
    return {**found, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cells that are missing."""
    described = parser(__doc__)
    described.add_argument("--weights", type=Path, help="state dict of MobileNetV2")
    described.add_argument("--pictures", type=Path, help="folder of JPEG and PNG files")
    described.add_argument("--calibration", type=int, default=128, help="pictures")
    described.add_argument("--judged", type=int, help="pictures at most; default all")
    described.add_argument("--views", type=int, default=1, help="crops of a picture")
    described.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
    described.add_argument("--recipes", nargs="*", default=list(RECIPES))
    described.add_argument("--methods", nargs="*", default=list(METHODS))
    described.add_argument("--types", nargs="*", default=list(TYPES), choices=[*TYPES])
    described.add_argument("--peers", nargs="*", default=list(PEERS), choices=[*PEERS])
    options = parse(described, argv)
    if options.weights is None or not options.weights.exists():
        print(f"MobileNetV2: left out, --weights {options.weights} is no file")
        return
    count = len(pictures(options.pictures))
    if count <= options.calibration:
        print(
            f"MobileNetV2: left out, --pictures {options.pictures} holds {count} pictures; "
            f"expected more than the {options.calibration} that calibrate"
        )
        return
    warnings.simplefilter("ignore")
    done = finished_rows(options.out, *_KEY)
    cells = [s for s in SETTINGS if s[0] in options.recipes and s[2] in options.methods]
    cells += [("float network", "none", name) for name in options.types]
    cells += [("peers", "none", peer) for peer in options.peers]
    with Reporter("own_pictures", options.out, PACKAGES) as report:
        for draw in options.draws:
            missing = [cell for cell in cells if (*cell, draw) not in done]
            if not missing:
                continue
            drawn = task(options, draw)
            sizes = {
                "pictures": len(drawn.judged),
                "calibration": options.calibration,
            }
            for recipe, target, method in missing:
                if recipe == "peers":
                    row = measure_peer(drawn, method)
                elif method in TYPES:
                    row = measure_type(drawn, method)
                else:
                    row = measure(drawn, recipe, target, method)
                case = dict(zip(_KEY, (recipe, target, method, draw), strict=True))
                report.value(**case, **sizes, **row)
    if options.out is not None:
        print(figures.own_pictures(figures.read_file(options.out)))


if __name__ == "__main__":
    main()
