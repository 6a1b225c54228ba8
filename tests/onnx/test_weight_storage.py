"""Weights are stored in the form that the target runs fast, and mean the same numbers."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq import QuantConfig, QuantDescriptor, Rule

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def export(model: nn.Module, x: Tensor, path: Path) -> dict[str, int]:
    """Write the model for ONNX Runtime; return the types of its stored weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    return {t.name: t.data_type for t in onnx.load(str(path)).graph.initializer}


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.filterwarnings("ignore:.*got negative values")  # Unsigned weights are legal.
def test_four_bit_convolutions_run_on_integers(unsigned: bool, tmp_path: Path) -> None:
    """Codes of 4 bits are stored in 8 bits; in 4 bits such a file took 50 times as long."""
    x = torch.randn(2, 8, 8, 8)
    weight = QuantDescriptor(4, axis=0, unsigned=unsigned)
    config = QuantConfig((Rule("type:*Conv2d", input=QuantDescriptor(), weight=weight),))
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    net.append(torchq.nn.QuantIdentity())
    model = calibrated(net, x, config=config)
    kinds = export(model, x, tmp_path / "m.onnx")
    wanted = onnx.TensorProto.UINT8 if unsigned else onnx.TensorProto.INT8
    assert kinds["0.weight_quantizer/weight"] == kinds["2.weight_quantizer/weight"] == wanted
    counts = torchq.inspect_onnx(tmp_path / "m.onnx").counts
    assert counts["QLinearConv"] == 2
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [x]).ok


def test_blocks_of_four_bits_stay(tmp_path: Path) -> None:
    """ONNX Runtime has a kernel for them, MatMulNBits."""
    config = QuantConfig((Rule("*", weight=QuantDescriptor(4, block_size=32)),))
    model = calibrated(nn.Sequential(nn.Linear(64, 8)), torch.randn(4, 64), config=config)
    torchq.export_onnx(model, torch.randn(4, 64), tmp_path / "m.onnx", target="onnxruntime")
    assert torchq.inspect_onnx(tmp_path / "m.onnx").counts["MatMulNBits"] == 1


class Mixed(nn.Module):
    """Convolutions with float results: before a GELU, a norm and a signed range."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.depthwise = nn.Conv2d(channels, channels, 3, groups=channels)
        self.norm, self.last = nn.LayerNorm(channels), nn.Conv2d(channels, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(nn.functional.gelu(self.stem(x)))
        return self.last(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_convolutions_in_float_have_float_weights(tmp_path: Path) -> None:
    """A DequantizeLinear in front of a float convolution makes it slower than in float32."""
    x = torch.randn(2, 3, 12, 12)
    model = calibrated(Mixed(), x, target="onnxruntime")
    kinds = export(model, x, tmp_path / "m.onnx")
    for layer in ("stem", "depthwise", "last"):
        assert kinds[f"{layer}.weight_quantizer/float weight"] == onnx.TensorProto.FLOAT
    report = torchq.inspect_onnx(tmp_path / "m.onnx")
    kinds_in_float = Counter(node.kind for node in report.fallbacks)
    assert kinds_in_float["Conv"] == 3
    assert all("its weight" in node.reason for node in report.fallbacks if node.kind == "Conv")
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [x]).ok


def test_with_an_example_convolutions_return_codes(tmp_path: Path) -> None:
    """The last one returns its result to the caller; 8 depthwise channels are faster in float."""
    x = torch.randn(2, 3, 12, 12)
    model = calibrated(Mixed(8), x, target="onnxruntime", example=x)
    kinds = export(model, x, tmp_path / "m.onnx")
    floats = [name for name in kinds if name.endswith("/float weight")]
    assert floats == ["last.weight_quantizer/float weight"]
    assert torchq.inspect_onnx(tmp_path / "m.onnx").counts["QLinearConv"] == 1
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [x, torch.randn(2, 3, 12, 12)]).ok


def test_a_changed_float_weight_is_named(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 12, 12)
    model, path = calibrated(Mixed(), x, target="onnxruntime"), tmp_path / "m.onnx"
    export(model, x, path)
    file = onnx.load(str(path))
    (tensor,) = [t for t in file.graph.initializer if t.name.startswith("depthwise.weight")]
    changed = onnx.numpy_helper.to_array(tensor).copy()
    changed[0, 0, 0, 0] *= 1.001
    tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
    onnx.save(file, str(path))
    report = torchq.verify_onnx(model, path, [x])
    (found,) = [layer for layer in report.layers if not layer.ok]
    assert (found.name, found.mismatches) == ("depthwise.weight_quantizer", 1)
