"""What is printed of networks of others fits a screen: each call's lines, in a table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.roads.end import ROAD
from torchq.utils import table

pytestmark = ROAD
pytest.importorskip("transformers", reason="one network is Hugging Face's")

#: The lines of a screen.
SCREEN = 40


def yolo() -> tuple[nn.Module, Any]:
    tasks = pytest.importorskip(
        "ultralytics.nn.tasks", reason="one network is Ultralytics'"
    )
    return tasks.DetectionModel("yolo11n.yaml", verbose=False), torch.rand(4, 3, 64, 64)


def bert() -> tuple[nn.Module, Any]:
    from tests.roads import test_hugging_face  # skips where its packages are missing

    return test_hugging_face.bert()


def resnet() -> tuple[nn.Module, Any]:
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(weights=None), torch.rand(4, 3, 64, 64)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "YOLO11n": yolo,
    "BERT": bert,
    "ResNet-18": resnet,
}


def give_statistics(network: nn.Module, example: Any) -> None:
    """Let BatchNorms of random weights have the statistics of an example."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    with torch.no_grad():
        network.train()(**example) if isinstance(example, dict) else network.train()(
            example
        )
    network.eval()


def reports(network: nn.Module, example: Any, folder: Path) -> dict[str, Any]:
    """Return what each call of a whole job prints."""
    quiet = {"progress": False}
    path = folder / "net.onnx"
    printed: dict[str, Any] = {}
    give_statistics(network, example)
    torchq.export_onnx(network, example, path, dynamo=False, **quiet)
    printed["inspect_onnx of a float file"] = torchq.inspect_onnx(path)
    printed["fuse_"] = torchq.fuse_(network, example, **quiet)
    options = {"target": "onnxruntime", "example": example}
    printed["plan"] = torchq.plan(network, **options)
    printed["quantize_"] = torchq.quantize_(network, **options, **quiet)
    printed["calibrate"] = torchq.calibrate(network, [example], **quiet)
    printed["summary"] = torchq.summary(network)
    printed["export_onnx"] = torchq.export_onnx(
        network, example, path, dynamo=False, **quiet
    )
    printed["inspect_onnx"] = torchq.inspect_onnx(path)
    printed["verify_onnx"] = torchq.verify_onnx(network, path, [example], **quiet)
    printed["doctor"] = torchq.doctor(network, [example], **quiet)
    printed["layer_errors"] = torchq.layer_errors(network, [example], **quiet)
    torchq.restore_(network)
    torchq.quantize_(network, target="tensorrt", example=example, **quiet)
    torchq.calibrate(network, [example], **quiet)
    tensorrt = torchq.export_onnx(network, example, path, dynamo=False, **quiet)
    printed["export_onnx for TensorRT"] = tensorrt
    return printed


def test_each_report_fits_a_screen(tmp_path: Path) -> None:
    counts: dict[str, dict[str, int]] = {}
    for name, build in NETWORKS.items():
        torch.manual_seed(0)
        network, example = build()
        for call, report in reports(network, example, tmp_path).items():
            counts.setdefault(call, {})[name] = len(str(report).splitlines())
    rows = [(call, *map(str, lines.values())) for call, lines in counts.items()]
    print("\n" + table([("lines printed by", *NETWORKS), *rows]))
    assert max(max(lines.values()) for lines in counts.values()) <= SCREEN
