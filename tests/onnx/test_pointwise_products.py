"""Convolutions of 1 x 1 with float results as products of integers in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import calibrated, run_file
from torchq.onnx.ir import load_model, nodes_of, replace_stored, save_model, value_of

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Detector(nn.Module):
    """Two heads of 1 x 1 on images of two sizes; the result of one is a list of pixels."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.fine, self.coarse = nn.Conv2d(16, 6, 1, bias=bias), nn.Conv2d(32, 6, 1, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        fine, coarse = self.fine(x), self.coarse(self.down(x).relu())
        return fine.flatten(2).transpose(1, 2), coarse


def quantized(model: nn.Module, x: Tensor) -> nn.Module:
    """Quantize a model for ONNX Runtime, with weights that overflow on no CPU."""
    torch.manual_seed(0)
    config = torchq.recipes.int8(reduce_range=True)
    return calibrated(model.eval(), x, config=config, target="onnxruntime", example=x)


def exported(model: nn.Module, x: Tensor, path: Path, **options: Any) -> nn.Module:
    """Quantize a model and export it for ONNX Runtime."""
    model = quantized(model, x)
    torchq.export_onnx(model, x, path, target="onnxruntime", **{"dynamo": False, **options})
    return model


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_run_on_integers(bias: bool, dynamo: bool, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", torch.randn(2, 3, 16, 12)
    shapes = {"x": {2: "height", 3: "width"}}
    model = exported(Detector(bias), x, path, dynamo=dynamo, dynamic_shapes=shapes)
    report = torchq.inspect_onnx(path)
    assert (
        sorted(node.kind for node in report.integer if "Conv" in node.kind) == ["QLinearConv"] * 2
    )
    assert sum(node.kind == "MatMulIntegerToFloat" for node in report.integer) == 2
    assert not [node for node in report.fallbacks if node.kind == "Conv"]
    found = torchq.verify_onnx(model, path, [x, torch.randn(1, 3, 20, 8)])
    assert found.ok and sum(layer.mismatches for layer in found.layers) == 0
    for optimize in (False, True):
        for got, expected in zip(run_file(path, x, optimize=optimize), model(x), strict=True):
            assert sqnr(got, expected) > 35  # The file has finer grids behind ReLUs.


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 5, 1)), (2, 4, 20)),
        (nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU(), nn.Conv3d(8, 5, 1)), (2, 4, 6, 7, 8)),
    ],
    ids=["one", "three"],
)
def test_other_dimensions(model: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", torch.randn(shape)
    model = exported(model, x, path)
    assert len(nodes_of(load_model(path), "MatMul")) == 1
    assert sqnr(run_file(path, x)[0], model(x)) > 35
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.parametrize(
    "head",
    [
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 8, 1, stride=2),
        nn.Conv2d(8, 8, 1, padding=1),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3)),
    ],
    ids=["kernel", "stride", "padding", "groups", "activation", "codes"],
)
@pytest.mark.filterwarnings("ignore:export_onnx")
def test_other_convolutions_stay(head: nn.Module, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", torch.randn(2, 3, 12, 12)
    model = exported(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), head), x, path)
    assert nodes_of(load_model(path), "MatMul") == []
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.filterwarnings("ignore:export_onnx")
def test_a_layer_that_is_called_twice_stays(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x).relu()
            return self.head(x), self.head(x.flip(1))

    path, x = tmp_path / "model.onnx", torch.randn(2, 3, 12, 12)
    model = exported(Twice(), x, path)
    assert torchq.verify_onnx(model, path, [x]).ok


def test_damaged_weights_are_found(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", torch.randn(2, 3, 16, 12)
    model = exported(Detector(), x, path)
    graph = load_model(path)
    stored = graph.graph.initializers["fine.weight_quantizer/weight.T"]
    assert list(stored.const_value.shape) == [16, 6]
    replace_stored(stored, value_of(stored).flip(0))
    save_model(graph, path)
    report = torchq.verify_onnx(model, path, [x])
    assert not report.ok
    assert report.layers[0].name == "fine.weight_quantizer"
