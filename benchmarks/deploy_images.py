"""A trained CIFAR ResNet-20 on real images: deployed on engines, in files, and in those of makers.

``engines`` compares the model on every engine with its simulation, in float64 too, which shows how
far float32 alone moves the codes. ``files`` compares an ONNX file with the simulation, unoptimised,
optimised, and layer by layer in codes. ``peers`` measures accuracy and speed of INT8 files beside
those of the quantizers of ONNX Runtime and OpenVINO, calibrated on the same images.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20
from benchmarks.deploy import MAKERS, RUNTIMES
from benchmarks.harness import Reporter, compare, decibels, parse, parser, timing
from torchq.errors import MissingExtraError

#: Placement of quantizers -> the engines that run models with it.
_PLACEMENTS: dict[str | None, tuple[str, ...]] = {
    None: ("torch",),
    "tensorrt": ("torch",),
    "onnxruntime": ("torch", "onnxruntime"),
    "openvino": ("torch", "openvino"),
}
_BATCH = 50


def _quantized(
    model: nn.Module, target: str | None, batches: list[Tensor], unsigned: bool = False
) -> nn.Module:
    quantized = copy.deepcopy(model)
    config = torchq.recipes.integer(unsigned="auto") if unsigned else None
    example = batches[0][:1] if target else None
    torchq.quantize_(quantized, config, target=target, example=example)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


# --- engines --------------------------------------------------------------------------------------


def engines(
    options: argparse.Namespace, model: nn.Module, test: Images, batches: list[Tensor]
) -> None:
    """Report one line for each placement and engine."""
    with Reporter("accuracy_deploy", options.out) as report:
        expected = logits(model, test)
        report.value(case="fp32", accuracy=accuracy(expected, test), images=len(test.labels))
        for placement, names in _PLACEMENTS.items():
            quantized = _quantized(model, placement, batches, unsigned=True)
            shown = f"{placement or 'inputs'}, unsigned"
            for name, fields in _agreements(quantized, test, names):
                report.value(case=name, placement=shown, **fields)


def _agreements(
    simulated: nn.Module, test: Images, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    plain = logits(simulated, test)
    exact = logits(copy.deepcopy(simulated).double(), replace(test, images=test.images.double()))

    def fields(result: Tensor) -> dict[str, float]:
        return {
            "accuracy": accuracy(result, test),
            "same_class": _same_class(result, plain),
            "same_class_float64": _same_class(result, exact),
            "to_simulation_db": decibels(result, plain),
            "to_float64_db": decibels(result, exact),
        }

    yield "simulation", fields(plain)
    for name in names:
        try:
            deployed = torchq.deploy(simulated, test.images[:_BATCH], target=name)
        except MissingExtraError as error:
            print(f"# {error}", flush=True)
            continue
        yield f"int8, {name}", fields(logits(deployed, test))
    yield "int8 layers only", fields(logits(torchq.deploy(simulated, fuse=False), test))


def _same_class(found: Tensor, expected: Tensor) -> float:
    return float((found.argmax(1) == expected.argmax(1)).float().mean())


# --- files ----------------------------------------------------------------------------------------


def files(
    options: argparse.Namespace, model: nn.Module, test: Images, batches: list[Tensor]
) -> None:
    """Report how a file agrees with the simulation, for no target and for ONNX Runtime."""
    with Reporter("deploy_onnx", options.out, ["onnx", "onnxruntime"]) as report:
        for target in (None, "onnxruntime"):
            quantized = _quantized(model, target, batches)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "int8.onnx")
                _export(quantized, batches[0][:1], path, target, dynamic_batch=True)
                found = torchq.verify_onnx(quantized, path, test.batches(250))
            case = {"model": "resnet20", "target": target, "images": len(test.labels)}
            (output,) = found.outputs
            report.value(**case, runs="session", top1=output.top1, sqnr_db=output.sqnr_db)
            plain = logits(quantized, test)
            double = replace(test, images=test.images.double())
            exact = logits(copy.deepcopy(quantized).double(), double)
            figures = {"top1": _same_class(plain, exact), "sqnr_db": decibels(plain, exact)}
            report.value(**case, runs="simulation in float64", **figures)
            counts = {
                "quantizers": len(found.layers),
                "codes": sum(layer.elements for layer in found.layers),
                "differ": sum(layer.differ for layer in found.layers),
            }
            report.value(**case, runs="layer by layer", **counts)


def _export(
    model: nn.Module, x: Tensor, path: Path, target: str | None, dynamic_batch: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(
            model,
            x,
            path,
            target=target,
            dynamo=False,
            input_names=["x"],
            dynamic_batch=dynamic_batch,
        )


# --- peers ----------------------------------------------------------------------------------------


def peers(
    options: argparse.Namespace, model: nn.Module, test: Images, batches: list[Tensor]
) -> None:
    """Report the accuracy and the speed of the float file, torchq's and the maker's."""
    data = list(torch.cat(batches).split(_BATCH))
    with Reporter("accuracy_peers", options.out, packages=MAKERS) as report:
        for runtime in MAKERS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    paths = _write_files(model, runtime, data, Path(folder))
                except ImportError as error:
                    print(f"# {error}", flush=True)
                    continue
                run, x = RUNTIMES[runtime], test.images[:_BATCH]
                rows = compare(
                    {name: run(path, x, 1) for name, path in paths.items()},
                    baseline="float32",
                    clock=time.process_time,
                    **timing(options),
                )
                for row in rows:
                    found = [
                        _first(run(paths[row.candidate], x, 1)()) for x in test.batches(_BATCH)
                    ]
                    report.value(
                        runtime=runtime,
                        candidate=row.candidate,
                        images=len(test.labels),
                        accuracy=accuracy(torch.cat(found), test),
                        speedup=round(1 / row.ratio, 3),
                        batch=_BATCH,
                    )


def _write_files(
    model: nn.Module, runtime: str, data: list[Tensor], folder: Path
) -> dict[str, Path]:
    """Write the float file, torchq's and the maker's; return them by candidate."""
    x, (quantize, suffix) = data[0], MAKERS[runtime]
    paths = {"float32": folder / "float.onnx", "torchq": folder / "torchq.onnx"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (x,), str(paths["float32"]), dynamo=False, opset_version=20, input_names=["x"]
        )
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, target=runtime, example=x)
    torchq.calibrate(quantized, data, method="mse", progress=False)
    _export(quantized, x, paths["torchq"], runtime, dynamic_batch=False)
    peer = (folder / "peer").with_suffix(suffix)
    paths[quantize(paths["float32"], peer, data, False)] = peer
    return paths


def _first(outputs: list[object] | dict[object, object]) -> Tensor:
    """Return the first output of a runtime, which are a list, or a mapping in OpenVINO."""
    values = outputs if isinstance(outputs, list) else list(outputs.values())
    return torch.as_tensor(values[0]).clone()


_PARTS = {"engines": engines, "files": files, "peers": peers}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each configuration of a part."""
    arguments = parser(__doc__)
    arguments.add_argument("part", choices=_PARTS)
    folder = "folder with resnet20.pt and the tars of images"
    arguments.add_argument("--data", type=Path, required=True, help=folder)
    arguments.add_argument("--images", type=int, default=10_000, help="of the test, times 50")
    arguments.add_argument("--calibration", type=int, default=500, help="images, times 50")
    options = parse(arguments, argv)
    test = read_split(options.data, "test", _BATCH if options.quick else options.images)
    count = _BATCH if options.quick else options.calibration
    batches = read_split(options.data, "train", count).batches(_BATCH)
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    _PARTS[options.part](options, model, test, batches)


if __name__ == "__main__":
    main()
