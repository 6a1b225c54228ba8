"""Accuracy and speed of a trained CIFAR ResNet-20 in files of torchq and of the runtimes' makers.

Each file is calibrated on the same training images and runs in the same runtime, on one thread.
Speed is the time of a batch of float32 over that of the file.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, read_split, resnet20
from benchmarks.deploy_onnx import RUNTIMES, export_float, first_result
from benchmarks.harness import Reporter, compare, parse, parser, timing
from benchmarks.vendors import VENDORS

__all__ = ["main"]

_BATCH = 50


def write_files(
    model: nn.Module, runtime: str, data: Sequence[Tensor], folder: Path
) -> dict[str, Path]:
    """Write the float file, torchq's and the maker's; return them by candidate."""
    x, (quantize, suffix) = data[0], VENDORS[runtime]
    files = {"float32": folder / "float.onnx", "torchq": folder / "torchq.onnx"}
    export_float(model, x, files["float32"])
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, target=runtime, example=x)
    torchq.calibrate(quantized, data, method="mse", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(
            quantized,
            x,
            files["torchq"],
            target=runtime,
            dynamo=False,
            input_names=["x"],
            dynamic_batch=False,
        )
    peer = (folder / "peer").with_suffix(suffix)
    files[quantize(files["float32"], peer, data, False)] = peer
    return files


def predictions(path: Path, runtime: str, test: Images) -> Tensor:
    """Return the outputs for all test images, (N, 10)."""
    call = RUNTIMES[runtime]
    return torch.cat([first_result(call(path, x, 1)()) for x in test.batches(_BATCH)])


def measure(
    report: Reporter,
    runtime: str,
    files: Mapping[str, Path],
    test: Images,
    options: argparse.Namespace,
) -> None:
    """Report the accuracy and the speed of each file."""
    calls = {name: RUNTIMES[runtime](path, test.images[:_BATCH], 1) for name, path in files.items()}
    rows = compare(calls, baseline="float32", clock=time.process_time, **timing(options))
    speeds = {row.candidate: 1 / row.ratio for row in rows}
    for name, path in files.items():
        share = accuracy(predictions(path, runtime, test), test)
        case = {"runtime": runtime, "candidate": name, "images": len(test.labels)}
        report.value(**case, accuracy=share, speedup=round(speeds[name], 3), batch=_BATCH)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each runtime and file."""
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="folder with resnet20.pt and the tars of images"
    )
    options.add_argument("--images", type=int, default=2000, help="test images, a multiple of 50")
    options.add_argument("--calibration", type=int, default=500, help="a multiple of 50")
    given = parse(options, argv)
    test = read_split(given.data, "test", 50 if given.quick else given.images)
    data = read_split(given.data, "train", 50 if given.quick else given.calibration).batches(_BATCH)
    model = resnet20(given.data)
    torchq.fuse_(model, data[0])
    with Reporter("accuracy_peers", given.out, packages=VENDORS) as report:
        for runtime in VENDORS:
            with tempfile.TemporaryDirectory() as folder:
                files = write_files(model, runtime, data, Path(folder))
                measure(report, runtime, files, test, given)


if __name__ == "__main__":
    main()
