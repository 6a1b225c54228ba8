"""Depthwise channels are padded to a multiple of 16 for ONNX Runtime, and nothing else changes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, run_file
from torchq.onnx.ir import load_model, save_model
from torchq.onnx.passes.channels.pad_depthwise import remove_padding

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Inverted(nn.Module):
    """An inverted residual block, with a gate on its depthwise channels if asked for."""

    def __init__(self, channels: int = 20, gate: bool = False) -> None:
        super().__init__()
        self.grow = nn.Conv2d(3, channels, 1)
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.squeeze = nn.Conv2d(channels, 4, 1) if gate else None
        self.excite = nn.Conv2d(4, channels, 1) if gate else None
        self.act, self.shrink = nn.Hardswish(), nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.deep(self.grow(x).relu()))
        if self.squeeze is not None and self.excite is not None:
            weight = self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu())
            y = y * torch.sigmoid(weight)
        return x + self.shrink(y)


class Concatenated(nn.Module):
    """A depthwise convolution whose channels go into a concatenation too."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.deep = nn.Conv2d(3, 20, 1), nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.last = nn.Conv2d(40, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grow(x).relu()
        return self.last(torch.cat([x, self.deep(x).relu()], 1))


def exported(model: nn.Module, x: Tensor, path: Path) -> dict[str, list[int]]:
    """Write a model for ONNX Runtime; return the shapes of its stored weights."""
    calibrated(model, x, target="onnxruntime", example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    tensors = onnx.load(str(path)).graph.initializer
    return {t.name.partition(".weight")[0]: list(t.dims) for t in tensors if "/weight" in t.name}


@pytest.mark.parametrize("gate", [False, True])
def test_channels_between_convolutions_are_padded(gate: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(2, 3, 7, 7), tmp_path / "m.onnx"
    model = Inverted(gate=gate).eval()
    shapes = exported(model, x, path)
    assert (shapes["grow"], shapes["deep"]) == ([32, 3, 1, 1], [32, 1, 3, 3])
    assert shapes["shrink"] == [3, 32, 1, 1]
    if gate:
        assert (shapes["squeeze"], shapes["excite"]) == ([4, 32, 1, 1], [32, 4, 1, 1])
    assert torchq.inspect_onnx(path).counts["QLinearConv"] >= 2
    assert torchq.verify_onnx(model, path, [x, torch.randn(3, 3, 7, 7)]).ok
    file = load_model(path)
    assert remove_padding(file) == []
    save_model(file, tmp_path / "plain.onnx")
    assert torch.equal(run_file(path, x)[0], run_file(tmp_path / "plain.onnx", x)[0])


def test_multiples_of_16_and_shared_channels_stay(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 7, 7)
    assert exported(Inverted(32), x, tmp_path / "a.onnx")["grow"] == [32, 3, 1, 1]
    assert exported(Concatenated(), x, tmp_path / "b.onnx")["grow"] == [20, 3, 1, 1]


@pytest.mark.parametrize("layer", ["grow", "deep", "shrink"])
def test_padding_that_is_not_zero_is_named(layer: str, tmp_path: Path) -> None:
    x, path, model = torch.randn(2, 3, 7, 7), tmp_path / "m.onnx", Inverted().eval()
    exported(model, x, path)
    file = onnx.load(str(path))
    (tensor,) = [t for t in file.graph.initializer if t.name == f"{layer}.weight_quantizer/weight"]
    changed = onnx.numpy_helper.to_array(tensor).copy()
    changed[-1, -1, 0, 0] = 5
    tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
    onnx.save(file, str(path))
    report = torchq.verify_onnx(model, path, [x])
    assert [r.name for r in report.layers if not r.ok] == [f"{layer}.weight_quantizer"]
