"""Which networks compile whole for a Snapdragon, and how near is its emulator to the simulation?

For each network: it is folded, planned for "qnn", calibrated, exported and compiled for a chip. A
row says whether all of it is on the chip, else what the provider did not take; the seconds of
export and compile; and in dB, on the images of calibration, how near the emulator is to the
simulation, the emulator to the float model, and the simulation to the float model. Weights are
random, so the figures compare the three with each other and say nothing of accuracy.

Every row is stored as it comes, and a second run goes on after the rows of the file. It needs the
extra ``qnn``; timm's networks are skipped where timm is not installed.

Example:
    python -m benchmarks.qnn_networks --out benchmarks/results/qnn_networks.jsonl
    python -m benchmarks.qnn_networks --out FILE --table
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.fold_after_training import UNet
from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.zoo_models import build
from torchq.errors import TorchqError
from torchq.graph import call_model, tensors_in
from torchq.runtimes import Qnn
from torchq.utils.text import table

NETWORKS = [
    *(
        "torchvision/resnet18",
        "torchvision/resnext50_32x4d",
        "torchvision/wide_resnet50_2",
    ),
    *("torchvision/vgg11_bn", "torchvision/alexnet", "torchvision/squeezenet1_1"),
    *("torchvision/googlenet", "torchvision/inception_v3", "torchvision/densenet121"),
    *("torchvision/mobilenet_v2", "torchvision/mobilenet_v3_small"),
    *("torchvision/mnasnet0_5", "torchvision/shufflenet_v2_x0_5"),
    *("torchvision/efficientnet_b0", "torchvision/regnet_x_400mf"),
    *("torchvision/regnet_y_400mf", "torchvision/convnext_tiny", "torchvision/swin_t"),
    *("torchvision/vit_b_32", "torchvision/fcn_resnet50"),
    *(
        "torchvision/lraspp_mobilenet_v3_large",
        "torchvision/deeplabv3_mobilenet_v3_large",
    ),
    *("unet", "gru", "bert"),
]
#: Pixels of a side where smaller images make their average pools windows of unequal sizes.
SIZES = {"torchvision/alexnet": 224, "torchvision/vgg11_bn": 224}
_KEY = ("network", "soc")
_IMAGES = 4


class Recurrent(nn.Module):
    """Linear layers around a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.gru = nn.GRU(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(self.first(x))[0])


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network in eval mode, and inputs for it."""
    torch.manual_seed(0)
    if name == "unet":
        return UNet().eval(), torch.randn(_IMAGES, 3, 64, 64)
    if name == "gru":
        return Recurrent().eval(), torch.randn(_IMAGES, 12, 16)
    if name == "bert":
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, batch_first=True, activation="gelu"
        )
        return nn.TransformerEncoder(layer, 2).eval(), torch.randn(_IMAGES, 16, 64)
    entry = build(name)
    for module in entry.model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)  # a head of zeros shows nothing
    side = SIZES.get(name, entry.example.shape[-1])
    return entry.model, torch.randn(_IMAGES, 3, side, side)


def decibels(signal: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return how near some results are to others, at the worst of them; at most 150."""
    levels = []
    for a, b in zip(signal, other, strict=True):
        noise = (a - b).double().square().mean()
        level = 10 * torch.log10(a.double().var(correction=0) / noise)
        levels.append(float(level.clamp(max=150)))
    return round(min(levels), 1)


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t for t in tensors_in(call_model(model, (x,))) if t.is_floating_point()]


def measure(name: str, soc: str, limit: float) -> dict[str, Any]:
    """Return the row of a network."""
    model, images = network(name)
    torchq.fuse_(model, images[:1], progress=False)
    simulated = copy.deepcopy(model)
    runtime = Qnn(soc=soc, limit=limit)
    plan = torchq.quantize_(
        simulated, target=runtime, example=images[:1], progress=False
    )
    torchq.calibrate(simulated, [images], progress=False)
    share = 0.0 if plan.share is None else round(plan.share.quantized, 4)
    row: dict[str, Any] = {"network": name, "soc": soc, "share": share}
    began = time.perf_counter()
    try:
        emulated = torchq.deploy(
            simulated, images[:1], target=runtime, check=False, progress=False
        )
        outcome = [
            torch.cat(parts) for parts in zip(*_by_image(emulated, images), strict=True)
        ]
    except TorchqError as error:
        return {**row, "whole": False, "reason": str(error)[:500]}
    row["seconds"] = round(time.perf_counter() - began, 1)
    expected, exact = results(simulated, images), results(model, images)
    return {
        **row,
        "whole": True,
        "emulator_to_simulation": decibels(expected, outcome),
        "emulator_to_float": decibels(exact, outcome),
        "simulation_to_float": decibels(exact, expected),
    }


def _by_image(model: nn.Module, images: torch.Tensor) -> list[list[torch.Tensor]]:
    return [results(model, images[i : i + 1]) for i in range(len(images))]


def print_table(path: Path) -> None:
    """Print the rows of a file."""
    lines_of_file = map(json.loads, path.read_text("utf-8").splitlines())
    rows = [row for row in lines_of_file if row["kind"] == "result"]
    heading = (
        "network",
        "whole",
        "share",
        "s",
        "emulator/simulation",
        "/float",
        "simulation/float",
    )
    lines = [heading]
    for row in rows:
        if not row["whole"]:
            lines.append(
                (
                    row["network"],
                    "no",
                    f"{row['share']:.1%}",
                    "",
                    "",
                    "",
                    row["reason"][:60],
                )
            )
            continue
        levels = ("emulator_to_simulation", "emulator_to_float", "simulation_to_float")
        figures = (f"{row[key]:.1f}" for key in levels)
        lines.append(
            (
                row["network"],
                "yes",
                f"{row['share']:.1%}",
                f"{row['seconds']:.0f}",
                *figures,
            )
        )
    whole = sum(row["whole"] for row in rows)
    print(table(lines, f"{whole} of {len(rows)} whole"))


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--only", default="*", help="a pattern of names")
    options.add_argument(
        "--soc", default="43", help="the chip, a key of torchq.runtimes.qnn.CHIPS"
    )
    options.add_argument(
        "--limit", type=float, default=200.0, help="seconds of a compile"
    )
    options.add_argument("--table", action="store_true", help="print the rows of --out")
    return parse(options, argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, or print the table."""
    options = options_of(argv)
    if options.table:
        print_table(options.out)
        return
    done = finished_rows(options.out, *_KEY)
    warnings.simplefilter("ignore")
    with Reporter(
        "qnn_networks", options.out, ("onnxruntime", "onnxruntime-qnn")
    ) as report:
        for name in NETWORKS:
            if (name, options.soc) not in done and fnmatchcase(name, options.only):
                report.value(**measure(name, options.soc, options.limit))


if __name__ == "__main__":
    main()
