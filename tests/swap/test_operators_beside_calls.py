"""A target's operators in forwards whose function calls are quantized too."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import QuantizationError
from torchq.nn.calls.modules import RoutedModule, route_
from torchq.nn.calls.routes import CallSite

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
TARGET = "onnxruntime"


class Attention(nn.Module):
    """As torchvision's Swin: weights in function calls, and products of two inputs with ``@``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(24, 8))
        self.out = nn.Linear(8, 8)
        self.scale = 0.3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv).chunk(3, -1)
        weights = (q * self.scale) @ k.transpose(-1, -2)
        return F.linear(weights.softmax(-1) @ v, self.out.weight, self.out.bias)


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.stem(x))
        return out


def quantized(block: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Net(block or Attention()).eval()
    torchq.quantize_(model, target=TARGET, example=X)
    torchq.calibrate(model, [X], progress=False)
    return model


def test_calls_and_operators_of_one_forward_are_quantized() -> None:
    torch.manual_seed(0)
    report = torchq.quantize_(Net(Attention()).eval(), target=TARGET, example=X)
    placed = {d.name for d in report.operator_rows()}
    assert placed >= {"block.quant_matmul", "block.quant_matmul_1"}
    assert not [d for d in report.skipped if d.class_name == "MatMul"]
    model = quantized()
    block: Any = model.block
    assert isinstance(block, RoutedModule)
    assert len(block.torchq_calls) == 2
    before = model(X)
    for quantizer in (
        block.quant_matmul.other_quantizer,
        block.qkv_call.weight_quantizer,
    ):
        assert quantizer.calibrated
        quantizer.mode = "off"
        assert not torch.equal(model(X), before)
        quantizer.mode = "quantize"
    torchq.restore_(model)
    assert vars(block).keys() == vars(Attention().eval()).keys()


@pytest.mark.eight_bit_products
def test_export_and_deploy_agree(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = quantized()
    torchq.export_onnx(
        model, X, tmp_path / "m.onnx", target=TARGET, dynamo=False, progress=False
    )
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [X]).ok
    with torch.no_grad():
        actual = torchq.deploy(model, X, target="torch", progress=False)(X)
        expected = model(X)
    assert (actual - expected).norm() < 0.01 * expected.norm()  # a code at a tie


class Computed(nn.Module):
    """Computes the weight of a product beside a product of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, 2 * self.weight) @ x.transpose(1, 2)


def test_a_product_with_a_computed_weight_is_one_of_a_layer_and_others_are_operators() -> (
    None
):
    torch.manual_seed(0)
    report = torchq.plan(Net(Computed()), target=TARGET, example=X)
    reason = "its operand is a weight, and the call is quantized as that of a layer"
    assert {d.name: d.reason for d in report.skipped} == {"block.quant_matmul": reason}
    block: Any = quantized(Computed()).block
    x = torch.randn(2, 5, 8)
    y = block.input_quantizer(x) @ block.weight_quantizer(2 * block.weight)
    assert torch.equal(
        block(x),
        block.quant_matmul_1(y, x.transpose(1, 2)),
    )


def test_operators_are_places_in_the_source() -> None:
    block = Attention()
    sites = [CallSite("linear", "qkv", "qkv_call", site="@linear0")]
    with pytest.raises(
        QuantizationError, match="no operator matmul; expected the code"
    ):
        route_(block, {"matmul": "quant_matmul"}, sites)
    assert type(block) is Attention


class Wrapped(nn.Module):
    """A convolution and what is done to its result, as Ultralytics writes it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class Beside(nn.Module):
    """The input, and what a module makes of it, added."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.branch(x))


@pytest.mark.parametrize(
    ("activation", "mode"), [(nn.Identity(), "off"), (nn.SiLU(), "quantize")]
)
def test_a_layer_inside_a_module_of_the_user_is_added_in_one_kernel(
    activation: nn.Module, mode: str
) -> None:
    """OpenVINO did not round the result of such a convolution, which the file quantized."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    model = Beside(nn.Sequential(Wrapped(nn.ReLU()), Wrapped(activation))).eval()
    torchq.quantize_(model, target="openvino", example=x, progress=False)
    assert model.quant_add.other_quantizer.mode == mode
    assert model.quant_add.input_quantizer.mode == "quantize"
