"""Count the lines that each call and each command prints: of a YOLO11n, a BERT and a ResNet-18.

A screen has 40 lines: the verdict, what stands out, the next step, and rows on request. Warnings
count too, as they stand on the same screen. Inputs are small, since lines depend on the layers of a
network. A network whose package is not installed is left out.
"""

from __future__ import annotations

import importlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.harness import Reporter, parse, parser
from torchq.cli import main as command_line
from torchq.graph import call_model

#: The lines of a screen.
SCREEN = 40
_PIXELS = 64
_PACKAGES = ("ultralytics", "transformers", "onnx", "onnxruntime")
_BATCHES = 3
_QUIET = {"progress": False}


# --- networks and data, which commands read by their names in this module -------------------------


def yolo11n() -> nn.Module:
    tasks = importlib.import_module("ultralytics.nn.tasks")
    network: nn.Module = tasks.DetectionModel("yolo11n.yaml", verbose=False)
    return with_statistics(network, images()[0])


def bert() -> nn.Module:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=12,
        num_attention_heads=2,
        intermediate_size=64,
    )
    network: nn.Module = transformers.BertForSequenceClassification(config)
    return network.eval()


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    models = importlib.import_module("torchvision.models")
    network: nn.Module = models.resnet18(weights=None)
    return with_statistics(network, images()[0])


def with_statistics(network: nn.Module, example: Any) -> nn.Module:
    """Give BatchNorms of random weights the statistics of an example; return it in eval mode."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    with torch.no_grad():
        call_model(network.train(), example)
    return network.eval()


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (4, 3, _PIXELS, _PIXELS)
    return [torch.rand(shape, generator=generator) for _ in range(_BATCHES)]


def sentences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    words = [
        torch.randint(0, 1000, (4, 12), generator=generator) for _ in range(_BATCHES)
    ]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in words]


#: The name of a network -> what builds it, and its batches.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "YOLO11n": (yolo11n, images),
    "BERT": (bert, sentences),
    "ResNet-18": (resnet18, images),
}


# --- what is printed ------------------------------------------------------------------------------


def screen_of(call: Callable[[], object]) -> list[str]:
    """Return the lines on the screen of a user who prints what a call returns."""
    screen = io.StringIO()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        screen.write(warnings.formatwarning(message, category, filename, lineno, line))

    with (
        redirect_stdout(screen),
        redirect_stderr(screen),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        # Python shows these of the main program alone.
        for of_developers in (DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", of_developers)
        # As Python does by itself, but for tests that collect warnings.
        warnings.showwarning = show
        try:
            result = call()
        except Exception as error:
            raise RuntimeError(screen.getvalue()) from error
        if result is not None:
            print(result)
    return screen.getvalue().splitlines()


def calls(
    network: nn.Module, batches: list[Any], folder: Path
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls of a whole job, each of which is made before the next one is asked for."""
    example = batches[0]
    path = folder / "net.onnx"
    options: dict[str, Any] = {"target": "onnxruntime", "example": example}

    def export() -> object:
        return torchq.export_onnx(network, example, path, dynamo=False, **_QUIET)

    screen_of(export)
    yield "inspect_onnx of a float file", lambda: torchq.inspect_onnx(path)
    yield "fuse_", lambda: torchq.fuse_(network, example, **_QUIET)
    yield (
        "forecast",
        lambda: torchq.forecast(network, example, ["onnxruntime"], threads=1, **_QUIET),
    )
    yield "tune", lambda: tuned(network, batches)
    yield "plan", lambda: torchq.plan(network, **options)
    yield "quantize_", lambda: torchq.quantize_(network, **options, **_QUIET)
    yield "calibrate", lambda: torchq.calibrate(network, batches, **_QUIET)
    yield "summary", lambda: torchq.summary(network)
    yield "sensitivity", lambda: torchq.sensitivity(network, batches, **_QUIET)
    yield "layer_errors", lambda: torchq.layer_errors(network, batches, **_QUIET)
    yield "doctor", lambda: torchq.doctor(network, batches, **_QUIET)
    yield "report", lambda: torchq.report(network, batches, **_QUIET)
    yield "export_onnx", export
    yield "inspect_onnx", lambda: torchq.inspect_onnx(path)
    yield "verify_onnx", lambda: torchq.verify_onnx(network, path, batches, **_QUIET)
    yield "deploy, and its summary", lambda: torchq.summary(deployed(network, example))
    for target in ("openvino", "tensorrt"):
        torchq.restore_(network)
        torchq.quantize_(network, target=target, example=example, **_QUIET)
        torchq.calibrate(network, batches, **_QUIET)
        yield f"export_onnx for {target}", export


def tuned(network: nn.Module, batches: list[Any]) -> object:
    """Try settings for a metric that none keeps, so that there are many rows."""

    def never_kept(candidate: nn.Module) -> float:
        return float(not torchq.workflow.is_quantized(candidate))

    limits: dict[str, Any] = {"max_drop": 0.0, "time_limit": 2.0}
    return torchq.tune(network, batches, never_kept, **limits, **_QUIET)


def deployed(network: nn.Module, example: Any) -> nn.Module:
    return torchq.deploy(network, example, target="onnxruntime")


def commands(
    name: str, data: str, folder: Path
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the commands for a network, by the names in this module."""
    source = ["--model", f"{__name__}:{name}", "--data", f"{__name__}:{data}"]
    path = str(folder / "command.onnx")
    argvs = {
        "quantize": [*source, "--target", "onnxruntime", "--export", path],
        "inspect": [path],
        "plan": [*source[:2], "--target", "onnxruntime"],
        "doctor": source,
        "report": source,
    }
    for command, arguments in argvs.items():
        argv = [command, *arguments]
        yield f"torchq {command}", lambda argv=argv: finished(argv)


def finished(argv: list[str]) -> None:
    """Run a command that is to succeed; 1 is an error that the doctor found in the model."""
    code = command_line(argv)
    if code not in (0, 1):
        raise RuntimeError(f"torchq {' '.join(argv)}: ended with code {code}")


def measure(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each call and command for a network with the lines of its screen."""
    build, data = NETWORKS[name]
    for call, make in calls(build(), data(), folder):
        yield call, screen_of(make)
    for call, make in commands(build.__name__, data.__name__, folder):
        yield call, screen_of(make)


def main(argv: Sequence[str] | None = None) -> None:
    """Count the lines of all calls for the networks whose packages are installed."""
    arguments = parser(__doc__)
    arguments.add_argument("--show", action="store_true", help="print the screens too")
    arguments.add_argument("--only", default="*", help="a pattern of names of networks")
    options = parse(arguments, argv)
    with (
        Reporter("screens", options.out, _PACKAGES) as report,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name in filter(partial(fnmatchcase, pat=options.only), NETWORKS):
            try:
                for call, screen in measure(name, Path(folder)):
                    report.value(network=name, call=call, lines=len(screen))
                    if options.show:
                        print(*screen, sep="\n")
            except ModuleNotFoundError as error:
                print(f"{name} is left out: {error}")


if __name__ == "__main__":
    main()
