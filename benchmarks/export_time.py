"""What does `torchq.export_onnx` cost beside torch's own export of the float network?

Both write a file by the exporter that is based on ``torch.export``, with the same open dimensions.
``calls`` are the Python functions that an export calls, in millions, which no other program on the
machine changes; seconds are those of the processor, the least of all rounds. ``nodes`` are those of
the graph that torch's exporter gives, before pairs are written: torch follows each of them several
times. Checks (``verify_onnx``) are timed apart.

Example:
    python -m benchmarks.export_time --rounds 3 --out benchmarks/results/export_time.jsonl
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.harness import Reporter, parse, parser
from torchq.utils.optional import import_optional

_PACKAGES = ("onnx", "onnxscript", "onnxruntime", "ultralytics")
_PIXELS = 64


def networks() -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build the networks whose packages are installed."""
    models = import_optional("torchvision.models", "export_time")
    size: dict[str, Any] = {"image_size": _PIXELS, "patch_size": 16, "num_layers": 12}
    tiny = {"num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
    built: dict[str, Callable[[], nn.Module]] = {
        "MobileNetV2": lambda: models.mobilenet_v2(weights=None),
        "ViT-Tiny": lambda: models.VisionTransformer(**size, **tiny),
    }
    try:
        from ultralytics.nn.tasks import DetectionModel
    except ImportError:
        return built
    return built | {"YOLO11n": lambda: DetectionModel("yolo11n.yaml", verbose=False)}


def seconds_of(call: Callable[[], object], rounds: int) -> float:
    """Return the least seconds of the processor that a call takes."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return round(min(seconds), 2)


def calls_of(call: Callable[[], object]) -> float:
    """Return how many functions a call calls, in millions."""
    profile = cProfile.Profile()
    profile.runcall(call)
    return round(pstats.Stats(profile).total_calls / 1e6, 2)


def measure(name: str, network: nn.Module, rounds: int) -> dict[str, Any]:
    """Return the row of a network."""
    x = torch.rand(2, 3, _PIXELS, _PIXELS)
    torchq.fuse_(network.eval(), x, progress=False)
    in_float = copy.deepcopy(network)
    torchq.quantize_(network, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(network, [x], progress=False)
    # Ultralytics keeps the places of boxes for the size of the last image.
    is_fixed = name.startswith("YOLO")
    shapes = None if is_fixed else ({0: "batch"},)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.onnx")

        def theirs() -> object:
            return torch.onnx.export(  # what is compared with
                in_float,
                (x,),
                str(path),
                dynamo=True,
                opset_version=20,
                dynamic_shapes=shapes,
                verbose=False,
            )

        def ours(dynamo: bool = True) -> object:
            options: dict[str, Any] = {"dynamic_batch": not is_fixed, "dynamo": dynamo}
            return torchq.export_onnx(network, x, path, progress=False, **options)

        def checked() -> object:
            return torchq.verify_onnx(network, path, [x], progress=False)

        theirs()  # the first export of a process loads the exporter
        ours()
        row = {"network": name, "pixels": _PIXELS}
        row["torch_float_s"] = seconds_of(theirs, rounds)
        row["torchq_s"] = seconds_of(ours, rounds)
        row["torchq_torchscript_s"] = seconds_of(lambda: ours(dynamo=False), rounds)
        row["verify_s"] = seconds_of(checked, 1)
        row["torch_float_calls"] = calls_of(theirs)
        row["torchq_calls"] = calls_of(ours)
    row["quantizers"] = len(torchq.workflow.quantizers(network))
    row["ratio"] = round(row["torchq_calls"] / row["torch_float_calls"], 2)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all networks."""
    options = parse(parser(__doc__), argv)
    warnings.simplefilter("ignore")
    with Reporter("export_time", options.out, _PACKAGES) as report:
        for name, build in networks().items():
            torch.manual_seed(0)
            report.value(**measure(name, build(), options.rounds))


if __name__ == "__main__":
    main()
