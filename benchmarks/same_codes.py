"""Does a file compute the codes of its model, in the runtime that it is for?

For networks x recipes x runtimes: the plan, the report of ``quantize_`` and a loaded file are
compared, and ``torchq.verify_onnx`` compares scales, weights and biases, the codes of every
quantizer where each layer adds exactly, and the outputs, with the model as it is. ResNet-20 and the
small RepVGG have trained weights where ``--data`` has them; the others random ones, which amplify a
code at a tie more than trained ones do.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.cifar import read_split, repvgg_cifar, resnet20
from benchmarks.harness import Reporter, parse, parser
from benchmarks.zoo_models import build
from torchq.swap import plan_of
from torchq.utils.text import table

RECIPES: dict[str, Callable[[], torchq.QuantConfig]] = {
    "int8": torchq.recipes.int8,
    "asymmetric": lambda: torchq.recipes.int8(symmetric=False),
    "w4a4": lambda: torchq.recipes.integer(4, 4),
}
TARGETS = ("onnxruntime", "openvino")
TORCHVISION = """
resnet18 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 mobilenet_v2 efficientnet_b0 googlenet
densenet121 regnet_x_400mf regnet_y_400mf mnasnet0_5 mobilenet_v3_large vit_b_32 convnext_tiny
lraspp_mobilenet_v3_large
"""


class Recurrent(nn.Module):
    """A convolution over the rows of an image, an LSTM over its columns, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.lstm = nn.LSTM(256, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, 32, W) to (N, 10)."""
        x = self.conv(x).relu().permute(0, 3, 1, 2).flatten(2)
        return self.head(self.lstm(x)[0][:, -1])


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """A U-Net of two levels with transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _pair(3, 16)
        self.second = _pair(16, 32)
        self.last = _pair(32, 16)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 4, H, W)."""
        x = self.first(x)
        low = self.second(F.max_pool2d(x, 2))
        return self.head(self.last(torch.cat([x, self.up(low)], 1)))


class Detector(nn.Module):
    """Features of two sizes with the boxes and classes of a single-shot detector."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.deeper = _pair(3, 16), _pair(16, 32)
        self.boxes = nn.ModuleList([nn.Conv2d(c, 8, 3, padding=1) for c in (16, 32)])
        self.classes = nn.ModuleList([nn.Conv2d(c, 10, 3, padding=1) for c in (16, 32)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (N, 3, H, W) to boxes (N, anchors, 4) and classes (N, anchors, 5)."""
        first = F.max_pool2d(self.body(x), 4)
        levels = (first, F.max_pool2d(self.deeper(first), 2))
        boxes = [head(level) for head, level in zip(self.boxes, levels, strict=True)]
        scores = [head(level) for head, level in zip(self.classes, levels, strict=True)]
        return _anchors(boxes, 4), _anchors(scores, 5).sigmoid()


def _anchors(levels: list[Tensor], size: int) -> Tensor:
    rows = [
        level.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, size))
        for level in levels
    ]
    return torch.cat(rows, 1)


def networks(data: Path | None) -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    """Yield name, maker and image size of each network."""
    yield "resnet20", lambda: resnet20(data), 32
    if data is not None:
        yield "repvgg", lambda: repvgg_cifar(data), 32
    for name in TORCHVISION.split():
        yield name, lambda name=name: build(f"torchvision/{name}").model, 64
    for cls in (Recurrent, UNet, Detector):
        yield cls.__name__.lower(), lambda cls=cls: cls().eval(), 32


def images(
    data: Path | None, size: int, count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return batches to calibrate with, and others to compare on."""
    torch.manual_seed(0)
    splits = [torch.randn(count, 3, 32, 32) for _ in range(2)]
    if data is not None:
        splits = [read_split(data, split, count).images for split in ("train", "test")]
    first, second = (
        list(F.interpolate(x, size=(size, size)).split(16)) for x in splits
    )
    return first, second


def compared(
    model: nn.Module, recipe: str, target: str, data: tuple[list[Tensor], list[Tensor]]
) -> dict[str, Any]:
    """Return the figures of one network, recipe and runtime."""
    calibration, test = data
    config = RECIPES[recipe]()
    fresh = copy.deepcopy(model)
    settings: dict[str, Any] = {"target": target, "example": calibration[0][:2]}
    plan = torchq.plan(model, config, **settings)
    swapped = torchq.quantize_(model, config, **settings)
    torchq.calibrate(model, calibration, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        saved = Path(folder, "model.pt")
        torchq.save(model, saved)
        loaded = torchq.load(fresh, saved)
        plans = [p.outcome() for p in (plan, swapped, plan_of(model), plan_of(loaded))]
        options: dict[str, Any] = {"target": target, "dynamo": False, "progress": False}
        torchq.export_onnx(model, calibration[0][:2], path, **options)
        report = torchq.verify_onnx(model, path, test, progress=False)
    codes = [layer for layer in report.layers if layer.allowed]
    worst = max(codes, key=lambda layer: layer.differ / max(layer.elements, 1))
    return {
        "same_plan": all(p == plans[0] for p in plans),
        "parameters": all(layer.ok for layer in report.layers if not layer.allowed),
        "codes": sum(layer.elements for layer in codes),
        "differ": sum(layer.differ for layer in codes),
        "by": max(layer.max_diff for layer in codes),
        "worst": f"{worst.differ} of {worst.elements} at {worst.name}",
        "ok": report.ok,
        "first": "" if report.first is None else report.first.why(),
        "equal": report.outputs[0].equal,
        "top1": report.outputs[0].top1,
        "sqnr_db": round(report.outputs[0].sqnr_db, 1),
    }


def main() -> None:
    """Compare every network that ``--networks`` names, and print one table."""
    command = parser(__doc__)
    command.add_argument(
        "--data", type=Path, help="folder of the images and trained weights"
    )
    command.add_argument("--images", type=int, default=64, help="images to compare on")
    command.add_argument("--networks", nargs="*", help="these alone; default all")
    command.add_argument("--recipes", nargs="*", default=list(RECIPES))
    command.add_argument("--targets", nargs="*", default=TARGETS)
    options = parse(command)
    rows = []
    with Reporter(
        "same_codes", options.out, ["onnx", "onnxruntime", "openvino"]
    ) as report:
        for name, make, size in networks(options.data):
            if options.networks and name not in options.networks:
                continue
            data = images(options.data, size, options.images)
            model = make()
            torchq.fuse_(model, data[0][0][:2])
            for recipe in options.recipes:
                for target in options.targets:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        figures = compared(copy.deepcopy(model), recipe, target, data)
                    report.value(network=name, recipe=recipe, target=target, **figures)
                    rows.append([name, recipe, target, *map(str, figures.values())])
                    head = ["network", "recipe", "runtime", *figures]
    print(table([head, *rows]))


if __name__ == "__main__":
    main()
