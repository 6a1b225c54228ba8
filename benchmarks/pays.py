"""Does a forecast hold, and is what ``keep="pays"`` plans never slower than float?

For each network and runtime: what :func:`torchq.forecast` said before any calibration (float, all
that the plan allows, the layers alone); what :func:`torchq.runtimes.speed` measures after a real
calibration, correction included; and the same of the plan that ``keep="pays"`` makes. A forecast
holds where the measured time lies between its two ends, or at most a tenth beyond them, or within
the noise that the timer states. Times are those of one picture on one thread, in milliseconds.

Weights are random: what a file takes does not depend on them. Every row is stored as it comes, and
a second run goes on after the rows of the file.

Example:
    python -m benchmarks.pays --out benchmarks/results/pays.jsonl --only "*mobilenet*"
    python -m benchmarks.pays --out FILE --table
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.harness import fill_or_show, parse, parser_of_networks
from benchmarks.qnn_networks import network
from torchq.analysis.forecast import FLOAT, INT8, LAYERS, TargetForecast
from torchq.errors import CalibrationError, TorchqError
from torchq.utils.text import table

NETWORKS = [
    "torchvision/resnet18",
    "torchvision/squeezenet1_1",
    "torchvision/googlenet",
    "torchvision/mobilenet_v2",
    "torchvision/mnasnet0_5",
    "torchvision/mobilenet_v3_small",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/efficientnet_b0",
    "torchvision/regnet_x_400mf",
    "torchvision/convnext_tiny",
    "unet",
    "bert",
]
TARGETS = ("onnxruntime", "openvino")
#: How far beyond its ends a forecast may be off, as a part of them.
_BEYOND = 0.1


def quantized(
    model: nn.Module, images: torch.Tensor, target: str, keep: str | None
) -> nn.Module | None:
    """Return a calibrated copy; None where all of it stays float."""
    twin = copy.deepcopy(model)
    example = images[:1]
    torchq.quantize_(twin, target=target, example=example, keep=keep, progress=False)
    if not torchq.workflow.quantizers(twin):
        return None
    try:
        torchq.calibrate(twin, [images], progress=False)
    except CalibrationError:
        torchq.calibrate(twin, [images], on_unseen="disable", progress=False)
    return twin


def ends(forecast: TargetForecast) -> dict[str, float]:
    """Return the times of a forecast, in milliseconds."""
    forms = {"float": FLOAT, "all": INT8, "layers": LAYERS}
    files = {name: forecast.best(form) for name, form in forms.items()}
    return {
        name: round(file.milliseconds, 4)
        for name, file in files.items()
        if file is not None
    }


def measure(name: str, target: str) -> dict[str, Any]:
    """Return the row of a network on a runtime."""
    model, images = network(name)
    example = images[:1]
    torchq.fuse_(model, example, progress=False)
    row: dict[str, Any] = {"network": name, "target": target}
    began = time.process_time()
    forecast = torchq.forecast(model, example, target, threads=1, progress=False)
    row |= {"forecast": ends(forecast[target]), "verdict": forecast[target].verdict}
    row["forecast_seconds"] = round(time.process_time() - began, 1)
    try:
        real = quantized(model, images, target, None)
        assert real is not None
        measured = torchq.runtimes.speed(real, example)
        row["measured"] = round(1000 * measured.quantized.median, 4)
        row["measured_float"] = round(1000 * measured.in_float.median, 4)
        row["noise"] = round(measured.quantized.noise + measured.in_float.noise, 4)
        began = time.process_time()
        paying = quantized(model, images, target, "pays")
        row["pays_seconds"] = round(time.process_time() - began, 1)
        row["pays"] = "float"
        if paying is not None:
            row["pays"] = round(torchq.runtimes.speed(paying, example).gain, 4)
    except TorchqError as error:
        row["problem"] = str(error)[:300]
    return row


def holds(row: dict[str, Any]) -> bool:
    """Return True if the measured time is what was forecast."""
    # Both are beside the float file of their own run, as machines drift between runs.
    before = row["forecast"]["float"]
    shares = [row["forecast"][form] / before for form in ("all", "layers")
              if form in row["forecast"]]  # fmt: skip
    measured = row["measured"] / row["measured_float"]
    slack = max(_BEYOND, row["noise"])
    return bool(min(shares) * (1 - slack) <= measured <= max(shares) * (1 + slack))


def shown(rows: list[dict[str, Any]]) -> str:
    """Return the table of some rows."""
    heading = ("network", "target", "float ms", "all", "layers", "measured", "holds",
               "keep=pays", "forecast s", "pays s")  # fmt: skip
    lines: list[tuple[str, ...]] = [heading]
    for row in rows:
        forecast = row["forecast"]
        if "problem" in row:
            lines.append((row["network"], row["target"], row["problem"][:60]))
            continue
        before = forecast["float"]
        shares = [
            f"{forecast[form] / before:.2f}" if form in forecast else ""
            for form in ("all", "layers")
        ]
        pays = row["pays"] if isinstance(row["pays"], str) else f"{row['pays']:.2f}x"
        lines.append(
            (
                row["network"],
                row["target"],
                f"{before:.3g}",
                *shares,
                f"{row['measured'] / row['measured_float']:.2f}",
                "yes" if holds(row) else "NO",
                pays,
                f"{row['forecast_seconds']:.0f}",
                f"{row['pays_seconds']:.0f}",
            )
        )
    good = sum("problem" not in row and holds(row) for row in rows)
    return table(lines, f"{good} of {len(rows)} forecasts hold")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, or print the table."""
    options = parse(parser_of_networks(__doc__), argv)
    cases = {
        (name, target): partial(measure, name, target)
        for name in NETWORKS
        for target in TARGETS
    }
    fill_or_show(options, "pays", TARGETS, cases, ("network", "target"), shown)


if __name__ == "__main__":
    main()
