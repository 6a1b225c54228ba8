"""BatchNorm, factors and offsets vanish in stored weights and scales for ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


#: A convolution of 1 x 1 with a float result.
PRODUCT = ("Transpose", "MatMul", "Transpose", "Add")


class Unfused(nn.Module):
    """A BatchNorm that nobody fused, with negative factors, and a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.gamma = nn.Conv2d(8, 8, 1), nn.Parameter(torch.rand(8) - 0.5)
        self.shift, self.last = nn.Parameter(torch.rand(8, 1, 1)), nn.Conv2d(8, 4, 1)
        nn.init.uniform_(self.norm.weight, -1.0, 1.0)
        nn.init.uniform_(self.norm.running_mean, -1.0, 1.0)
        nn.init.uniform_(self.norm.bias, -1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.second(x).mul(self.gamma.reshape(1, -1, 1, 1)) + self.shift
        return self.last(x)


class Scaled(nn.Module):
    """A learned factor and offset behind a ReLU, as in HGNetV2."""

    def __init__(self, factor: float = 0.7, offset: float = 0.1) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.factor, self.offset = (nn.Parameter(torch.tensor([v])) for v in (factor, offset))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.factor * self.first(x).relu() + self.offset)


def exported(
    model: nn.Module, x: Tensor, path: Path, perchannel: bool = True, weight_bits: int = 8
) -> list[str]:
    """Write a model for ONNX Runtime; return its float operators other than Q and DQ."""
    config = torchq.recipes.int8()
    if weight_bits < 8:
        config = torchq.recipes.integer(weight_bits, 8, first_last=weight_bits)
    if not perchannel:
        weight = torchq.Rule("*", input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor())
        config = torchq.QuantConfig((weight,))
    calibrated(model, x, target="onnxruntime", example=x, config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    kinds = [node.op_type for node in onnx.load(str(path)).graph.node]
    return [kind for kind in kinds if kind not in ("QuantizeLinear", "DequantizeLinear")]


@pytest.mark.parametrize("perchannel", [False, True])
def test_norms_and_factors_become_part_of_weights(perchannel: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model, path = torch.randn(2, 3, 9, 9), Unfused().eval(), tmp_path / "m.onnx"
    kinds = exported(model, x, path, perchannel)
    assert kinds == ["Conv", "Relu", "Conv", *PRODUCT]
    assert torchq.inspect_onnx(path).counts["QLinearConv"] == 2
    assert torchq.verify_onnx(model, path, [x, torch.randn(2, 3, 9, 9)]).ok


class Last(nn.Module):
    """A factor behind the last convolution, which runs in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gamma = nn.Conv2d(3, 8, 3), nn.Parameter(torch.rand(8, 1, 1) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.gamma


def test_negative_factors_of_the_least_code_of_four_bits(tmp_path: Path) -> None:
    """Its negative needs a fifth bit."""
    torch.manual_seed(0)
    model, x, path = Unfused().eval(), torch.randn(2, 3, 8, 8), tmp_path / "m.onnx"
    nn.init.constant_(model.norm.weight, -1.0)
    with torch.no_grad():
        model.first.weight.copy_(-model.first.weight.abs())
    assert not {"Mul", "BatchNormalization"} & {*exported(model, x, path, weight_bits=4)}
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


def test_weights_of_float_convolutions_include_factors_too(tmp_path: Path) -> None:
    x, model, path = torch.randn(2, 3, 9, 9), Last().eval(), tmp_path / "m.onnx"
    assert exported(model, x, path) == ["Conv"]
    assert torchq.verify_onnx(model, path, [x]).ok
    damaged = onnx.load(str(path))
    name = "conv.weight_quantizer/float weight"
    stored = next(t for t in damaged.graph.initializer if t.name == name)
    stored.raw_data = (1.01 * onnx.numpy_helper.to_array(stored)).astype("float32").tobytes()
    onnx.save(damaged, str(path))
    report = torchq.verify_onnx(model, path, [x])
    assert not report.ok and "conv" in report.layers[0].layers


def test_factors_of_codes_become_scales(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model, path = torch.randn(2, 3, 9, 9), Scaled().eval(), tmp_path / "m.onnx"
    assert exported(model, x, path) == ["Conv", "Relu", "Add", *PRODUCT]
    assert torchq.verify_onnx(model, path, [x, torch.randn(2, 3, 9, 9)]).ok


@pytest.mark.parametrize("offset", [0.1, -0.3])
def test_offsets_of_codes_are_added_by_an_integer_kernel(offset: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model, path = torch.randn(2, 3, 9, 9), Scaled(offset=offset).eval(), tmp_path / "m.onnx"
    exported(model, x, path)
    assert torchq.inspect_onnx(path).counts["QLinearAdd"] == 1
    assert torchq.verify_onnx(model, path, [x, torch.randn(2, 3, 9, 9)]).ok


def test_an_offset_of_zero_stays(tmp_path: Path) -> None:
    x, model, path = torch.randn(2, 3, 9, 9), Scaled(offset=0.0).eval(), tmp_path / "m.onnx"
    exported(model, x, path)
    assert not any("/offset/" in t.name for t in onnx.load(str(path)).graph.initializer)


@pytest.mark.parametrize("factor", [0.0, -0.7])
def test_other_factors_of_codes_stay(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model, path = torch.randn(2, 3, 9, 9), Scaled(factor).eval(), tmp_path / "m.onnx"
    assert "Mul" in exported(model, x, path)
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        (Unfused, "first.weight_quantizer/DequantizeLinear/scales"),
        (Unfused, "second.weight_quantizer/DequantizeLinear/scales"),
        (Unfused, "first.weight_quantizer/bias"),
        (Scaled, "first.output_quantizer/DequantizeLinear/scale"),
        (Scaled, "/Add/offset/scale"),
    ],
)
def test_damage_to_what_was_folded_is_found(
    model: type[nn.Module], tensor: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, net, path = torch.randn(2, 3, 9, 9), model().eval(), tmp_path / "m.onnx"
    exported(net, x, path)
    file = onnx.load(str(path))
    (stored,) = [t for t in file.graph.initializer if t.name.startswith(tensor)]
    changed = onnx.numpy_helper.to_array(stored).copy() * 1.05
    stored.CopyFrom(onnx.numpy_helper.from_array(changed.astype("float32"), stored.name))
    onnx.save(file, str(path))
    assert not torchq.verify_onnx(net, path, [x]).ok
