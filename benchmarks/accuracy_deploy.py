"""Compare a trained CIFAR ResNet-20, deployed on every engine, with its simulation on real images.

Each row holds the accuracy, the share of images with the same class, and the ratio of signal to
error. The columns of float64 refer to the simulation in float64: they show how far float32 alone,
on either side, moves the codes. ``--unsigned`` lets calibration choose unsigned codes where it sees
no negative value, so that files for ONNX Runtime and OpenVINO hold the grids of the simulation.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20
from benchmarks.deploy_native import db
from benchmarks.harness import Reporter, parse, parser
from torchq.engines import ENGINES, Engine, TorchEngine
from torchq.errors import MissingExtraError

__all__ = ["main"]

#: Placement of quantizers -> the engines that run models with it.
_PLACEMENTS: dict[str | None, tuple[str, ...]] = {
    None: ("torch",),
    "tensorrt": ("torch",),
    "onnxruntime": ("torch", "onnxruntime"),
    "openvino": ("torch", "openvino"),
}


def _arguments() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="folder with resnet20.pt and the tars of images"
    )
    options.add_argument(
        "--images", type=int, default=10_000, help="test images (default: %(default)s)"
    )
    options.add_argument(
        "--calibration",
        type=int,
        default=512,
        help="training images to calibrate on (default: %(default)s)",
    )
    names = [placement or "inputs" for placement in _PLACEMENTS]
    options.add_argument("--placements", nargs="+", default=names, choices=names)
    options.add_argument(
        "--unsigned", action="store_true", help="unsigned codes where nothing is negative"
    )
    options.add_argument(
        "--rounded-biases", action="store_true", help="torchq.onnx.round_biases_ after calibration"
    )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = parse(_arguments(), argv)
    test = read_split(options.data, "test", 50 if options.quick else options.images)
    batches = read_split(
        options.data, "train", 64 if options.quick else options.calibration
    ).batches(64)
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    with Reporter("accuracy_deploy", options.out) as report:
        expected = logits(model, test)
        report.value(case="fp32", accuracy=accuracy(expected, test), images=len(test.labels))
        for placement, engines in _PLACEMENTS.items():
            if (placement or "inputs") not in options.placements:
                continue
            quantized = _quantized(model, placement, batches, options.unsigned)
            shown = (placement or "inputs") + ", unsigned" * options.unsigned
            if options.rounded_biases:
                torchq.onnx.round_biases_(quantized)
                shown += ", rounded biases"
            for name, fields in _rows(quantized, test, engines):
                report.value(case=name, placement=shown, **fields)


def _quantized(
    model: nn.Module, placement: str | None, batches: list[Tensor], unsigned: bool = False
) -> nn.Module:
    quantized = copy.deepcopy(model)
    config = torchq.recipes.integer(unsigned="auto") if unsigned else None
    example = batches[0][:1] if placement else None
    torchq.quantize_(quantized, config, target=placement, example=example)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


def _rows(
    simulated: nn.Module, test: Images, engines: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    plain = logits(simulated, test)
    exact = logits(copy.deepcopy(simulated).double(), replace(test, images=test.images.double()))
    yield "simulation", _fields(plain, plain, exact, test)
    for engine in engines:
        try:
            deployed = torchq.deploy(simulated, test.images[:50], engine=_engine(engine))
        except MissingExtraError as error:
            print(f"# {error}", flush=True)
            continue
        yield f"int8, {engine}", _fields(logits(deployed, test), plain, exact, test)
    alone = torchq.deploy(simulated, fuse=False)
    yield "int8 layers only", _fields(logits(alone, test), plain, exact, test)


def _engine(name: str) -> Engine:
    """Return an engine that computes in integers even where float would be faster."""
    return TorchEngine(measured=False) if name == "torch" else ENGINES[name]()


def _fields(result: Tensor, plain: Tensor, exact: Tensor, test: Images) -> dict[str, float]:
    return {
        "accuracy": accuracy(result, test),
        "same_class": float((result.argmax(1) == plain.argmax(1)).float().mean()),
        "same_class_float64": float((result.argmax(1) == exact.argmax(1)).float().mean()),
        "to_simulation_db": round(db(result, plain), 1),
        "to_float64_db": round(db(result, exact), 1),
    }


if __name__ == "__main__":
    main()
