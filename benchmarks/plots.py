"""Draw the pictures of README and of the site, light and dark: python -m benchmarks.plots

Every bar and point is read from the lines in benchmarks/results/, so a new run of a benchmark and
a new run of this program renew a picture. The drawings of concepts compute what they show.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import drawings
from benchmarks.picture_style import THEMES, Theme, bars, figure, save

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """The lines of all benchmarks."""

    rows: Sequence[Row]

    def value(self, key: str, bench: str, **wanted: object) -> Any:
        """Return one figure of the last line that has all ``wanted`` values.

        Raises:
            LookupError: No line has them; the benchmark wrote something else than is drawn here.
        """
        for row in reversed(self.rows):
            if row["bench"] == bench and all(row.get(k) == v for k, v in wanted.items()):
                return row[key]
        raise LookupError(f"no line of {bench} has {wanted}")


def read_results(folder: Path = RESULTS) -> Measured:
    """Return every result line below ``folder``."""
    files = sorted(folder.glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text("utf-8").splitlines()]
    return Measured([row for row in rows if row["kind"] == "result"])


def fake_quantization(measured: Measured, theme: Theme) -> Any:
    """Draw the cost of fake quantization, in copies of the tensor."""
    candidates = {
        "torchq, compiled": "torchq compiled",
        "torchq": "torchq",
        "torchao": "torchao",
        "torch's operator": "aten",
        "ModelOpt": "modelopt",
        "Brevitas": "brevitas",
    }
    lookup = {"bench": "fake_quant", "case": "int8 per tensor", "mode": "forward"}
    values = [measured.value("ratio", candidate=name, **lookup) for name in candidates.values()]
    fig, axes = figure(theme, 1, (6.4, 2.6))
    bars(axes[0], list(candidates), values, theme, "{:.1f}")
    axes[0].set_title("fake quantization of a tensor; a copy of it costs 1")
    return fig


def speed(measured: Measured, theme: Theme) -> Any:
    """Draw how much faster networks on the engines of ``deploy`` are than FP32 in PyTorch."""
    networks = {"ResNet-18": "resnet18", "ResNet-50": "resnet50", "MobileNetV2": "mobilenet_v2"}
    fig, axes = figure(theme, len(networks), (8.0, 2.4))
    engines = {
        "FP32 eager": None,
        "INT8, torch": "torch quantized, own placement",
        "INT8, ONNX Runtime": "onnxruntime quantized",
        "INT8, OpenVINO": "openvino quantized",
    }
    for place, (title, model) in zip(axes, networks.items(), strict=True):
        lookup = {"bench": "deploy_native", "model": model, "batch": 1, "threads": 1}
        values = [
            1.0 if name is None else measured.value("speedup", candidate=name, **lookup)
            for name in engines.values()
        ]
        bars(place, list(engines), values, theme, "{:.1f}x", labels=place is axes[0])
        place.set_title(title)
    return fig


def accuracy(measured: Measured, theme: Theme) -> Any:
    """Draw the accuracy of ResNet-20 in several formats, none of them trained."""
    trained = {"bench": "accuracy_qat", "network": "resnet20"}
    float_row = {"bench": "accuracy_ptq", "network": "resnet20", "widths": "FP32"}

    def solved(widths: str, algorithm: str) -> float:
        wanted = {"widths": widths, "algorithm": algorithm, "network": "resnet20", "seed": 0}
        found: float = measured.value("accuracy", "accuracy_ptq", **wanted)
        return 100 * found

    bars_by_name = {
        "FP32": 100 * measured.value("accuracy", **float_row),
        "INT8": measured.value("accuracy", widths="w8a8", method="ptq mse", **trained),
        "W4A4": solved("W4A4", "recipes.w4a4()"),
        "W4A4, gptq_": solved("W4A4", "gptq_"),
        "W2A4, gptq_": solved("W2A4", "gptq_"),
    }
    fig, axes = figure(theme, 1, (6.4, 2.4))
    bars(axes[0], list(bars_by_name), list(bars_by_name.values()), theme, "{:.1f} %")
    axes[0].set_title("ResNet-20 on 10,000 CIFAR-10 images, after training")
    return fig


def peers(measured: Measured, theme: Theme) -> Any:
    """Draw the speed of INT8 files of a ResNet-20 against their accuracy, torchq's and others'."""
    makers = {"onnxruntime": "onnxruntime.quantization", "openvino": "nncf"}
    titles = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    fig, axes = figure(theme, 2, (8.0, 2.8))
    for place, (runtime, maker) in zip(axes, makers.items(), strict=True):
        for candidate in ("float32", "torchq", maker):
            lookup = {"bench": "accuracy_peers", "runtime": runtime, "candidate": candidate}
            x = measured.value("speedup", **lookup)
            y = 100 * measured.value("accuracy", **lookup)
            colour = theme.accent if candidate == "torchq" else theme.quiet
            place.plot(x, y, "o", color=colour, markersize=9)
            offset = (0, 10) if candidate == "torchq" else (0, -16)
            place.annotate(
                candidate, (x, y), xytext=offset, textcoords="offset points", ha="center"
            )
        place.set_xlim(0.5, 4.5)
        place.set_ylim(86.5, 89.0)
        place.set_xlabel("times as fast as float32")
        place.set_title(f"INT8 in {titles[runtime]}")
    axes[0].set_ylabel("accuracy, %")
    return fig


PICTURES: dict[str, Callable[[Measured, Theme], Any]] = {
    "fake-quantization": fake_quantization,
    "speed": speed,
    "accuracy": accuracy,
    "peers": peers,
    **drawings.DRAWINGS,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", choices=[[], *PICTURES], help="default: all")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the SVG files")
    options = parser.parse_args(argv)
    measured = read_results()
    for name in options.pictures or PICTURES:
        for theme in THEMES:
            path = options.out / f"{name}-{theme.name}.svg"
            save(PICTURES[name](measured, theme), path)
            print(path)


if __name__ == "__main__":
    main()
