"""Which networks compile whole for a Snapdragon, and how near is its emulator to float?

For each network: it is folded, planned for "qnn", calibrated, exported and compiled for a chip,
with activations of 8 or of 16 bits. A row says whether all of it is on the chip, else what the
provider did not take; the seconds of it all; the layer of which most codes differ where it is given
equal codes; and in dB, on the images of calibration, how near the emulator is to the simulation,
the emulator to the float model, and the simulation to the float model. With ``--by onnxruntime``
the file is that of onnxruntime.quantization for the chip, of the same folded network: uint8
or uint16 activations, int8 weights with a scale for each channel. What falls out runs on the CPU.
Weights are random, so the figures compare these with each other and say nothing of accuracy.

Every row is stored as it comes, and a second run goes on after the rows of the file. It needs the
extra ``qnn``; timm's networks are skipped where timm is not installed.

Example:
    python -m benchmarks.qnn_networks --out benchmarks/results/qnn_networks.jsonl
    python -m benchmarks.qnn_networks --out FILE --table
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.fold_after_training import UNet
from benchmarks.harness import fill_or_show, parse, parser_of_networks
from benchmarks.zoo_models import build
from torchq.errors import TorchqError
from torchq.graph import call_model, tensors_in
from torchq.onnx.ir import load_model
from torchq.runtimes import Qnn
from torchq.runtimes.interface import Run
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
_KEY = ("network", "soc", "bits", "by")
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


def measure(name: str, soc: str, bits: int, by: str, limit: float) -> dict[str, Any]:
    """Return the row of a network whose activations have so many bits."""
    model, images = network(name)
    torchq.fuse_(model, images[:1], progress=False)
    runtime = Kept(soc=soc, limit=limit)
    row: dict[str, Any] = {"network": name, "soc": soc, "bits": bits, "by": by}
    began = time.perf_counter()
    try:
        figures = MAKERS[by](model, images, runtime, bits)
    except TorchqError as error:
        row |= {"whole": False, "reason": str(error)[:500]}
    else:
        seconds = round(time.perf_counter() - began, 1)
        return {**row, "whole": True, "seconds": seconds, **figures}
    try:  # with what fell out on the CPU
        runtime = replace(runtime, partly=True)
        return row | MAKERS[by](model, images, runtime, bits)
    except TorchqError as error:
        return {**row, "fails": str(error)[:500]}


@dataclass(frozen=True, kw_only=True, repr=False)
class Kept(Qnn):
    """The chip, with the files that were compiled for it."""

    compiled: dict[bytes, Run] = field(default_factory=dict)

    def emulated(self, path: Path) -> Run:
        graph = path.read_bytes()
        if graph not in self.compiled:
            self.compiled[graph] = super().emulated(path)
        return self.compiled[graph]


def by_torchq(
    model: nn.Module, images: torch.Tensor, runtime: Kept, bits: int
) -> dict[str, Any]:
    """Return how near a network is to the simulation and to float, planned for the chip."""
    simulated = copy.deepcopy(model)
    config = None if bits == 8 else torchq.recipes.w8a16()
    plan = torchq.quantize_(
        simulated, config, target=runtime, example=images[:1], progress=False
    )
    torchq.calibrate(simulated, [images], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        options: dict[str, Any] = {"target": runtime, "progress": False}
        torchq.export_onnx(simulated, images[:1], path, dynamo=False, **options)
        report = torchq.verify_onnx(simulated, path, [images[:1]], **options)
        (name,) = (value.name for value in load_model(path).graph.inputs)
        outcome = by_image(runtime.emulated(path), str(name), images)
    expected, exact = results(simulated, images), results(model, images)
    rows = [row for row in report.layers if row.elements and row.allowed]
    worst = max(rows, key=lambda row: row.differ / row.elements)
    verdicts = [v for v in report.verdicts if runtime.emulates in v.what]
    return {
        "share": 0.0 if plan.share is None else round(plan.share.quantized, 4),
        "emulator_to_simulation": decibels(expected, outcome),
        "emulator_to_float": decibels(exact, outcome),
        "simulation_to_float": decibels(exact, expected),
        "agree": [verdict.ok for verdict in verdicts],
        "reasons": [verdict.reason for verdict in verdicts],
        "worst": worst.name,
        "worst_share": round(worst.differ / worst.elements, 4),
        "most_steps": max(row.max_diff for row in rows),
        "beyond": [row.why() for row in rows if not row.ok][:5],
    }


def by_image(run: Run, name: str, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a file for all images, of which it takes one."""
    parts = zip(*(run({name: image}) for image in images.split(1)), strict=True)
    tensors = [torch.cat(part) for part in parts]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


class Outputs(nn.Module):
    """A network that returns its floating-point tensors alone, as a file does."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = tensors_in(self.network(x))
        return tuple(tensor for tensor in found if tensor.is_floating_point())


class Reader:
    """Images for the calibration of onnxruntime.quantization, one after the other."""

    def __init__(self, images: torch.Tensor) -> None:
        self._feeds = iter([{"x": image[None].numpy()} for image in images])

    def get_next(self) -> dict[str, Any] | None:
        """Return the inputs of the next call."""
        return next(self._feeds, None)


def by_onnxruntime(
    model: nn.Module, images: torch.Tensor, runtime: Kept, bits: int
) -> dict[str, Any]:
    """Return how near a network is to float by onnxruntime.quantization's recipe for the chip."""
    tool = import_module("onnxruntime.quantization")
    recipe = import_module("onnxruntime.quantization.execution_providers.qnn")
    shapes = import_module("onnxruntime.quantization.shape_inference")
    kinds = tool.QuantType
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name, "plain.onnx")
        inferred = Path(name, "inferred.onnx")
        prepared = Path(name, "prepared.onnx")
        path = Path(name, "quantized.onnx")
        torch.onnx.export(
            Outputs(model).eval(),
            (images[:1],),
            plain,
            input_names=["x"],
            dynamo=False,
            opset_version=17,
        )
        if not recipe.qnn_preprocess_model(plain, prepared):
            prepared = plain
        shapes.quant_pre_process(prepared, inferred, skip_symbolic_shape=True)
        config = recipe.get_qnn_qdq_config(
            inferred,
            Reader(images),
            activation_type=kinds.QUInt8 if bits == 8 else kinds.QUInt16,
            weight_type=kinds.QInt8,
            per_channel=True,
        )
        tool.quantize(inferred, path, config)
        outcome = by_image(runtime.emulated(path), "x", images)
    return {"emulator_to_float": decibels(results(model, images), outcome)}


#: What made the file -> its measurement.
MAKERS = {"torchq": by_torchq, "onnxruntime": by_onnxruntime}


def shown(rows: list[dict[str, Any]]) -> str:
    """Return the table of some rows."""
    levels = ("emulator_to_simulation", "emulator_to_float", "simulation_to_float")
    lines = [
        ("network", "by", "bits", "whole", "emulator/simulation", "/float", "sim/float")
    ]
    for row in rows:
        figures = (f"{row[key]:.1f}" if key in row else "" for key in levels)
        whole = "yes" if row["whole"] else "no"
        lines.append((row["network"], row["by"], str(row["bits"]), whole, *figures))
    count = sum(row["whole"] for row in rows)
    return table(lines, f"{count} of {len(rows)} whole")


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser_of_networks(__doc__)
    options.add_argument(
        "--soc", default="43", help="the chip, a key of torchq.runtimes.qnn.CHIPS"
    )
    options.add_argument(
        "--limit", type=float, default=200.0, help="seconds of a compile"
    )
    options.add_argument("--bits", type=int, choices=(8, 16), default=8)
    options.add_argument("--by", choices=MAKERS, default="torchq")
    return parse(options, argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, or print the table."""
    options = options_of(argv)
    cases = {}
    for name in NETWORKS:
        case = (name, options.soc, options.bits, options.by)
        cases[case] = partial(measure, *case, options.limit)
    packages = ("onnxruntime", "onnxruntime-qnn")
    fill_or_show(options, "qnn_networks", packages, cases, _KEY, shown)


if __name__ == "__main__":
    main()
