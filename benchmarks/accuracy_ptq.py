"""Accuracy of trained networks with few bits after each algorithm of torchq.ptq.

Nothing sees a label before the accuracy is measured, and nothing sees a test image before. The
divergence from the float model is measured on training images that no algorithm sees. A seed
chooses which training images an algorithm sees. Read each row against the FP32 row of its network.
With ``--out`` a run goes on after the rows that the file has already.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20, some_batches
from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.qat_networks import depthwise, kept, train_depthwise
from benchmarks.repvgg import repvgg_cifar

__all__ = ["NETWORKS", "main"]


def _depthwise(folder: Path) -> nn.Module:
    """Return the MobileNet, from ``depthwise.pt`` in the folder or trained now, for half an hour.

    The file is the one that benchmarks/accuracy_qat.py keeps.
    """

    def train() -> nn.Module:
        return train_depthwise(read_split(folder, "train", 50_000), _FLOAT_STEPS)

    return kept(folder / "depthwise.pt", depthwise(), train)


#: Name -> what builds the trained network from a folder.
NETWORKS: dict[str, Callable[[Path], nn.Module]] = {
    "resnet20": resnet20,
    "repvgg": repvgg_cifar,
    "depthwise": _depthwise,
}
_WIDTHS = ((4, 8), (4, 4), (3, 4), (2, 4))
_BATCH = 64
# Training steps of the depthwise network.
_FLOAT_STEPS = 6000
# Images that activation ranges are calibrated on.
_CALIBRATION = 512
# Training images that a seed chooses from.
_POOL = 4096
# The most training images that an algorithm sees; the divergence is measured on the others.
_MOST_IMAGES = 1024
# Changed copies of each image.
_COPIES = 3


def _nothing(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    """Leave the calibrated model as it is."""


def _correct_bias(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    torchq.ptq.correct_bias_(model, batches[:8], progress=False)


def _equalize(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    """Equalize channels, calibrate again, and correct biases: what needs no rounding."""
    for quantizer in torchq.workflow.quantizers(model).values():
        quantizer.forget_amax()
    torchq.ptq.equalize_(model, batches[0][:4])
    torchq.calibrate(model, batches, progress=False)
    torchq.ptq.correct_bias_(model, batches, progress=False)


def _gptq(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    torchq.ptq.gptq_(model, batches, progress=False)


def _published_gptq(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    torchq.ptq.gptq_(model, batches, target="weight", refine=False, progress=False)


def _smooth_gptq(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    """Smooth channels, calibrate again, and round."""
    for quantizer in torchq.workflow.quantizers(model).values():
        quantizer.forget_amax()
    torchq.ptq.smooth_(model, batches, progress=False)
    torchq.calibrate(model, batches, progress=False)
    torchq.ptq.gptq_(model, batches, progress=False)


def _with_changed_copies(
    batches: list[torch.Tensor], seed: int, count: int = 1
) -> list[torch.Tensor]:
    """Return the images, and after them copies that are moved by some pixels or mirrored.

    Args:
        batches: of images.
        seed: of the changes.
        count: copies of each image.
    """
    generator = torch.Generator().manual_seed(seed)
    copies = []
    for batch in batches * count:
        images = Images(batch, torch.zeros(len(batch)))
        copies.append(images.augmented(torch.arange(len(batch)), generator)[0])
    return [*batches, *copies]


def _gptq_copies(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    batches = _with_changed_copies(batches, seed, _COPIES)
    torchq.ptq.gptq_(model, batches, progress=False)


def _adaround(model: nn.Module, batches: list[torch.Tensor], seed: int) -> None:
    torchq.ptq.adaround_(model, batches, seed=seed, progress=False)


# The algorithm that only calibrates, with the recipe's own settings in place of a width.
_RECIPE = "recipes.w4a4()"

# Name -> the algorithm, and the number of its images.
_ALGORITHMS: dict[str, tuple[Callable[[nn.Module, list[torch.Tensor], int], None], int]] = {
    "nearest": (_nothing, 512),
    _RECIPE: (_nothing, 512),
    "bias correction": (_correct_bias, 512),
    "equalization, bias correction": (_equalize, 512),
    "GPTQ as published": (_published_gptq, 512),
    "gptq_": (_gptq, 512),
    "gptq_, 1,024 images": (_gptq, 1024),
    "smooth_, gptq_": (_smooth_gptq, 512),
    "gptq_, 1,024 images and copies": (_gptq_copies, 1024),
    "adaround_": (_adaround, 1024),
}


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with tars and weights")
    options.add_argument("--images", type=int, default=10_000, help="test images")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    options.add_argument("--algorithms", nargs="+", default=list(_ALGORITHMS), choices=_ALGORITHMS)
    options.add_argument("--widths", nargs="+", default=[f"W{w}A{a}" for w, a in _WIDTHS])
    return options


_KEY = ("network", "widths", "algorithm", "seed", "images")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each network, width, algorithm and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.images, options.seeds = 50, options.seeds[:1]
    done = finished_rows(options.out, *_KEY)
    test = read_split(options.data, "test", options.images)
    pool = read_split(options.data, "train", _MOST_IMAGES + 64 if options.quick else _POOL)
    with Reporter("accuracy_ptq", options.out) as report:
        for network in options.networks:
            model = NETWORKS[network](options.data)
            torchq.fuse_(model, test.images[:4])
            row = {"network": network, "widths": "FP32", "algorithm": None, "seed": None}
            if _key(row := {**row, "images": options.images}) not in done:
                report.value(**row, accuracy=round(accuracy(logits(model, test), test), 4))
            for seed in options.seeds:
                for widths in options.widths:
                    for name in options.algorithms:
                        if name == _RECIPE and widths != "W4A4":
                            continue
                        row = {"network": network, "widths": widths, "algorithm": name}
                        row |= {"seed": seed, "images": options.images}
                        if _key(row) not in done:
                            report.value(**row, **_measure(model, row, test, pool))


def _recipe(row: dict[str, Any]) -> torchq.QuantConfig:
    """Return the recipe of a row."""
    if row["algorithm"] == _RECIPE:
        return torchq.recipes.w4a4()
    weight, input = (int(part) for part in row["widths"][1:].split("A"))
    return torchq.recipes.integer(weight, input, first_last=8)


def _measure(model: nn.Module, row: dict[str, Any], test: Images, pool: Images) -> dict[str, Any]:
    """Return the accuracy and the seconds of process time of one algorithm."""
    algorithm, count = _ALGORITHMS[row["algorithm"]]
    batches = some_batches(pool.images, len(pool.images), row["seed"], _BATCH)
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, _recipe(row))
    torchq.calibrate(quantized, batches[: _CALIBRATION // _BATCH], progress=False)
    start = time.process_time()
    algorithm(quantized, batches[: count // _BATCH], row["seed"])
    seconds = round(time.process_time() - start, 1)
    found = round(accuracy(logits(quantized, test), test), 4)
    images = torch.cat(batches[_MOST_IMAGES // _BATCH :])
    unseen = Images(images, torch.zeros(len(images)))
    return {
        "training_images": count,
        "accuracy": found,
        "divergence": round(_divergence(logits(quantized, unseen), logits(model, unseen)), 5),
        "process_seconds": seconds,
    }


def _divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the mean divergence of the probabilities from those of the float model, in nats.

    It tells methods apart whose accuracies differ by chance alone.
    """
    known = expected.log_softmax(1)
    return ((known - found.log_softmax(1)) * known.exp()).sum(1).mean().item()


if __name__ == "__main__":
    main()
