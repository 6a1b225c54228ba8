"""Average pooling of codes is a depthwise convolution for ONNX Runtime, with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.onnx.ir import bypass, load_model, nodes_of, replace_stored, save_model, value_of
from torchq.onnx.qdq import write_record

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

BOTH_EXPORTERS = [
    False,
    True,
]
IMAGES = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))


class Pooled(nn.Module):
    """A pooling between two convolutions, and a head."""

    def __init__(self, pool: nn.Module, channels: int = 16) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, channels, 1), pool
        self.second, self.head = nn.Conv2d(channels, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.pool(self.first(x))).relu()
        return self.head(x.mean((2, 3)))


def exported(model: nn.Module, path: Path, dynamo: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = calibrated(model.eval(), IMAGES, target="onnxruntime", example=IMAGES)
    torchq.export_onnx(
        model,
        IMAGES,
        path,
        target="onnxruntime",
        dynamo=dynamo,
        dynamic_batch=dynamo,
        progress=False,
    )
    return model


def kinds(path: Path) -> list[str]:
    return [node.kind for node in torchq.inspect_onnx(path).integer]


@pytest.mark.parametrize("dynamo", BOTH_EXPORTERS)
def test_pooling_becomes_a_convolution(dynamo: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = exported(Pooled(nn.AvgPool2d(2)), path, dynamo)
    assert not nodes_of(load_model(path), "AveragePool")
    assert kinds(path).count("QLinearConv") == 3
    assert "QLinearAveragePool" not in kinds(path)
    report = torchq.verify_onnx(model, path, [IMAGES, IMAGES.flip(2)], progress=False)
    assert report.ok
    assert min(output.sqnr_db for output in report.outputs) > 100


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.AvgPool2d((1, 3), stride=(2, 1), padding=(0, 1)),
        nn.AvgPool2d(5, stride=2, padding=2),
        nn.AvgPool2d(3, stride=2, ceil_mode=True, count_include_pad=False),
    ],
    ids=str,
)
def test_kernels_strides_and_padding_are_kept(pool: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = exported(Pooled(pool), path)
    assert not nodes_of(load_model(path), "AveragePool")
    assert torchq.verify_onnx(model, path, [IMAGES], progress=False).ok


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3, padding=1, count_include_pad=False),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(4, stride=3, padding=1, ceil_mode=True),
    ],
    ids=str,
)
def test_what_weights_cannot_express_stays(pool: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = exported(Pooled(pool), path)
    assert len(nodes_of(load_model(path), "AveragePool")) == 1
    report = torchq.verify_onnx(model, path, [IMAGES], progress=False)
    assert report.ok
    assert report.optimized[0].sqnr_db > 60  # A code that falls the other way costs less.


def test_a_kernel_that_computes_something_else_is_found(tmp_path: Path) -> None:
    """The kernel of ONNX Runtime divides by the area of a whole window."""
    path = tmp_path / "m.onnx"
    pooled = Pooled(nn.AvgPool2d(4, ceil_mode=True))
    for layer in (pooled.first, pooled.second, pooled.head):
        nn.init.zeros_(layer.bias)  # The result is to come from what is pooled.
    model = exported(pooled, path)
    assert torchq.verify_onnx(model, path, [IMAGES], progress=False).ok
    file = load_model(path)
    (guard,) = nodes_of(file, "Max")
    bypass(guard)
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [IMAGES], progress=False)
    assert not report.ok
    assert report.misread == (report.outputs[0].name,)
    assert "ONNX Runtime's optimisations compute something else: " in str(report)
    assert all(layer.ok for layer in report.layers)
    write_record(file, target="openvino")
    save_model(file, path)
    assert torchq.verify_onnx(model, path, [IMAGES], progress=False).ok


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_damaged_average_is_named(part: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = exported(Pooled(nn.AvgPool2d(2)), path)
    file = load_model(path)
    (name,) = (n for n in file.graph.initializers if n.endswith(f"/average/{part}"))
    stored = file.graph.initializers[name]
    changed = value_of(stored).clone()
    changed.view(-1)[0] = 0 if part == "codes" else 0.26
    replace_stored(stored, changed)
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [IMAGES], progress=False)
    assert not report.ok
    assert report.layers[0].name == "second.input_quantizer"


def test_other_targets_keep_the_pooling(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = exported(Pooled(nn.AvgPool2d(2)), path)
    torchq.export_onnx(model, IMAGES, path, target="openvino", dynamo=False, progress=False)
    assert len(nodes_of(load_model(path), "AveragePool")) == 1
