"""Draw the pictures of README and of the page on concepts, light and dark.

Measured bars are read from the lines in benchmarks/results/; the drawings of concepts compute what
they show. A new run of a benchmark and a new run of this program renew a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn

import torchq
from benchmarks.figures import (
    ROOT,
    accuracies,
    answers_kept,
    latencies,
    memories,
    read_results,
    speedup,
)
from torchq.cli.demo import DemoNet, load_digits, train
from torchq.functional import fake_quantize

matplotlib.use("svg")
from matplotlib import pyplot


@dataclass(frozen=True)
class Theme:
    """The colours of one background. The background itself stays transparent."""

    name: str
    ink: str
    quiet: str
    accent: str
    second: str


THEMES = (
    Theme("light", ink="#1f2328", quiet="#8c959f", accent="#0969da", second="#bf5b04"),
    Theme("dark", ink="#e6edf3", quiet="#7d8590", accent="#58a6ff", second="#f0883e"),
)


def figure(
    theme: Theme, columns: int, size: tuple[float, float], rows: int = 1
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row, in the colours of ``theme``."""
    settings = {
        "svg.fonttype": "none",  # text stays text, so that it can be read and found
        "svg.hashsalt": "torchq",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.titlecolor": theme.ink,
        "axes.edgecolor": theme.quiet,
        "axes.labelcolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
    }
    pyplot.rcParams.update(settings)
    fig, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    return fig, list(axes.flat)


def bars(
    place: Any,
    names: Sequence[str],
    values: Sequence[float | None],
    theme: Theme,
    text: str,
    labels: bool = True,
) -> None:
    """Draw horizontal bars, the first at the top, with their values; torchq's stand out.

    None stands for what was not measured.
    """
    lengths = [value or 0.0 for value in values]
    ours = [name.startswith(("torchq", "INT8", "W4A4", "W2A4")) for name in names]
    colours = [theme.accent if is_ours else theme.quiet for is_ours in ours]
    rows = range(len(names), 0, -1)
    place.barh(list(rows), lengths, color=colours, height=0.62)
    for row, value, length in zip(rows, values, lengths, strict=True):
        place.annotate(
            "not measured" if value is None else text.format(value),
            (length, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    place.set_yticks(list(rows), names if labels else [""] * len(names))
    place.set_xticks([])
    place.set_xlim(0, 1.22 * max(lengths))
    place.tick_params(length=0)
    place.spines["bottom"].set_visible(False)


def save(fig: Any, path: Path) -> None:
    """Write ``fig`` as an SVG file without a date, so that equal pictures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(fig)


@cache
def _trained_weights() -> Tensor:
    """Return the weights of one convolution of the demo's network, trained on digits."""
    torch.manual_seed(0)
    model = DemoNet()
    data, _ = load_digits(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    train(model, data, optimizer, epochs=4, seed=0)
    torchq.fuse_(model.eval(), data.images[:8])
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    return layers[2].weight.detach()


def _no_left_axis(place: Any) -> None:
    place.set_yticks([])
    place.spines["left"].set_visible(False)


def _weights_and_codes(place: Any, theme: Theme) -> None:
    """Draw a histogram of float weights upwards, and of their codes of 8 bits downwards."""
    filters = _trained_weights().flatten(1)
    weights = filters[(filters.abs().amax(1) / filters.std(1)).argmin()]
    amax = weights.abs().amax()
    form = torchq.formats.INT8
    step = float(torchq.functional.scale_from_amax(amax, form))
    width = 6 * step
    edges = (torch.arange(-22, 24) - 0.5) * width
    counts, _ = torch.histogram(weights, edges)
    codes, totals = fake_quantize(weights, amax, form).unique(return_counts=True)
    starts = edges[:-1].tolist()
    place.bar(starts, counts.tolist(), width=width, align="edge", color=theme.quiet)
    place.bar(codes.tolist(), (-totals).tolist(), width=step / 2, color=theme.accent)
    place.axhline(0, color=theme.quiet, linewidth=0.8)
    place.set_title("float weights above,\nINT8 codes below")
    place.set_xticks([])
    place.spines["bottom"].set_visible(False)
    _no_left_axis(place)


def _gains(places: list[Any], theme: Theme, named: int) -> None:
    """Draw accuracy, time and memory of FP32 and INT8; the first ``named`` places have names."""
    accuracy, time, memory = places
    measured = read_results()
    bars(accuracy, ["FP32", "INT8"], accuracies(measured), theme, "{:.1f} %")
    accuracy.set_title("accuracy, ResNet-20")
    bars(
        time,
        ["FP32", "INT8"],
        latencies(measured),
        theme,
        "{:.0f} ms",
        labels=named > 1,
    )
    time.set_title("one image, ResNet-50")
    bars(
        memory, ["FP32", "INT8"], memories(measured), theme, "{:.0f} MiB", labels=False
    )
    memory.set_title("memory, ResNet-50")


def overview(theme: Theme) -> Any:
    """Draw weights before and after rounding to codes, and what INT8 costs and gains."""
    fig, places = figure(theme, 4, (10.0, 2.5))
    _weights_and_codes(places[0], theme)
    _gains(places[1:], theme, named=1)
    return fig


def overview_narrow(theme: Theme) -> Any:
    """Draw the same for a phone, two by two."""
    fig, places = figure(theme, 2, (5.0, 4.2), rows=2)
    _weights_and_codes(places[0], theme)
    _gains(places[1:], theme, named=2)
    return fig


def scale(theme: Theme) -> Any:
    """Draw symmetric codes of four bits: every value goes to the nearest point of the grid."""
    fig, (place,) = figure(theme, 1, (8.0, 1.9))
    amax = torch.tensor(2.1)
    form = torchq.formats.INT4
    step = float(torchq.functional.scale_from_amax(amax, form))
    codes = torch.arange(-7, 8)
    place.plot(codes * step, torch.zeros(15), "|", color=theme.accent, markersize=22)
    for code in codes.tolist():
        place.annotate(
            str(code), (code * step, -0.45), ha="center", va="top", color=theme.accent
        )
    values = torch.tensor([-1.93, -0.72, 0.1, 0.52, 1.36, 2.6])
    for value, rounded in zip(values, fake_quantize(values, amax, form), strict=True):
        start = (float(value), 0.95)
        end = (float(rounded), 0.2)
        arrow = {"arrowstyle": "->", "color": theme.quiet}
        place.annotate("", end, start, arrowprops=arrow)
        place.annotate(f"{float(value):.2f}", start, ha="center", va="bottom")
    place.annotate("code", (-2.45, -0.45), ha="right", va="top", color=theme.accent)
    place.annotate("value", (-2.45, 0.95), ha="right", va="bottom")
    place.set_ylim(-1.1, 1.4)
    place.set_xlim(-2.9, 2.9)
    place.axis("off")
    place.set_title(f"amax = 2.1, scale = 2.1 / 7 = {step:.1f}; 2.60 is clipped")
    return fig


def granularity(theme: Theme) -> Any:
    """Draw the error of one scale for a tensor beside one scale for each output channel."""
    weight = _trained_weights().flatten(1)[:16] * torch.logspace(0, -1.5, 16)[:, None]
    fig, axes = figure(theme, 2, (8.0, 2.6))
    granularities = {
        "one scale for the tensor": torchq.formats.PerTensor(),
        "one scale for each output channel": torchq.formats.PerAxis((0,)),
    }
    for place, (title, kind) in zip(axes, granularities.items(), strict=True):
        amax = torchq.functional.reduce_amax(weight, kind)
        error = fake_quantize(weight, amax, torchq.formats.INT4, kind) - weight
        relative = error.norm(dim=1) / weight.norm(dim=1)
        place.bar(range(16), relative.tolist(), color=theme.accent)
        place.set_ylim(0, 1.05)
        place.set_xticks([0, 15], ["channel 0, large", "channel 15, small"])
        place.set_title(title)
    axes[0].set_ylabel("relative error, 4 bits")
    return fig


def gradient(theme: Theme) -> Any:
    """Draw the staircase of fake quantization and the gradient that training uses."""
    x = torch.linspace(-1.6, 1.6, 801, requires_grad=True)
    y = fake_quantize(
        x, torch.tensor(1.0), torchq.formats.integer_format(3, narrow=True)
    )
    y.sum().backward()
    fig, (forward, backward) = figure(theme, 2, (8.0, 2.4))
    forward.plot(x.detach(), x.detach(), color=theme.quiet, linewidth=1)
    forward.plot(x.detach(), y.detach(), color=theme.accent)
    forward.set_title("forward: three bits, amax = 1")
    backward.plot(x.detach(), x.grad, color=theme.second)
    backward.set_ylim(-0.1, 1.2)
    backward.set_title("backward: 1 inside the range, 0 where it clips")
    return fig


def fake_quantization(theme: Theme) -> Any:
    """Draw the cost of fake quantization, in copies of the tensor."""
    names = {
        "torchq, compiled": "torchq compiled",
        "torchq": "torchq",
        "torchao": "torchao",
        "torch's operator": "aten",
        "ModelOpt": "modelopt",
        "Brevitas": "brevitas",
    }
    lookup = {"bench": "fake_quant", "case": "int8 per tensor", "mode": "forward"}
    values = [
        read_results().value("ratio", candidate=name, **lookup)
        for name in names.values()
    ]
    fig, axes = figure(theme, 1, (6.4, 2.6))
    bars(axes[0], list(names), values, theme, "{:.1f}")
    axes[0].set_title("fake quantization of a tensor; a copy of it costs 1")
    return fig


def speed(theme: Theme) -> Any:
    """Draw how much faster networks on the engines of ``deploy`` are than FP32 in PyTorch."""
    networks = {
        "ResNet-18": "resnet18",
        "ResNet-50": "resnet50",
        "MobileNetV2": "mobilenet_v2",
    }
    engines = {
        "INT8, torch": "torch quantized, own placement",
        "INT8, ONNX Runtime": "onnxruntime quantized",
        "INT8, OpenVINO": "openvino quantized",
    }
    fig, axes = figure(theme, len(networks), (8.0, 2.4))
    for place, (title, model) in zip(axes, networks.items(), strict=True):
        values = [
            1.0,
            *(speedup(read_results(), model, 1, name) for name in engines.values()),
        ]
        names = ["FP32 eager", *engines]
        bars(place, names, values, theme, "{:.1f}x", labels=place is axes[0])
        place.set_title(title)
    return fig


def accuracy(theme: Theme) -> Any:
    """Draw how many answers of INT8 networks differ from FP32, untouched, beside other toolkits."""
    names = {
        "torchq": ("int8, onnxruntime", "untouched"),
        "ModelOpt": ("peers", "ModelOpt"),
        "Brevitas": ("peers", "Brevitas"),
        "NNCF": ("peers", "NNCF"),
        "ONNX Runtime": ("peers", "quantize_static"),
    }
    networks = {
        "ResNet-20": "resnet20",
        "MobileNet": "mobilenet",
        "detector": "detector",
        "BERT": "bert",
        "ViT": "transformer",
    }
    fig, axes = figure(theme, len(networks), (11.0, 2.4))
    for place, (title, network) in zip(axes, networks.items(), strict=True):
        values: list[float | None] = []
        for recipe, method in names.values():
            lookup = {"network": network, "recipe": recipe, "method": method}
            rows = read_results().all("accuracy", **lookup)
            differing = [100 - answers_kept(row) for row in rows]
            values.append(mean(differing) if differing else None)
        bars(place, list(names), values, theme, "{:.1f} %", labels=place is axes[0])
        place.set_title(title)
    fig.suptitle("answers of INT8 that differ from FP32, by default")
    return fig


PICTURES: dict[str, Callable[[Theme], Any]] = {
    "fake-quantization": fake_quantization,
    "speed": speed,
    "accuracy": accuracy,
    "overview": overview,
    "overview-narrow": overview_narrow,
    "scale": scale,
    "granularity": granularity,
    "gradient": gradient,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "pictures", nargs="*", choices=[[], *PICTURES], help="default: all"
    )
    images = ROOT / "docs" / "images"
    parser.add_argument(
        "--out", type=Path, default=images, help="folder of the SVG files"
    )
    options = parser.parse_args(argv)
    for name in options.pictures or PICTURES:
        for theme in THEMES:
            path = options.out / f"{name}-{theme.name}.svg"
            save(PICTURES[name](theme), path)
            print(path)


if __name__ == "__main__":
    main()
