"""Asymmetric ranges, power-of-two scales and roundings in exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import activation_qparams
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ExportError
from torchq.nn import TensorQuantizer
from torchq.onnx.ir import load_model
from torchq.workflow import quantizers


class Net(nn.Module):
    """A convolution, GELU, a convolution, SiLU and a linear layer, with quantized ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x))
        x = nn.functional.silu(self.second(x))
        return self.head(x.mean((2, 3)))


def images(generator: torch.Generator, count: int = 4) -> Tensor:
    return torch.rand(count, 3, 12, 12, generator=generator) * 3 - 0.6


def quantized(generator: torch.Generator, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    input = QuantDescriptor(**{"symmetric": False, **fields})
    rules = [
        Rule(f"type:{t}", input=input, weight=QuantDescriptor(axis=0)) for t in _LAYERS
    ]
    torchq.quantize_(model, QuantConfig(tuple(rules)))
    torchq.calibrate(model, [images(generator)], progress=False)
    return model


_LAYERS = ("Conv2d", "Linear")


@pytest.mark.eight_bit_products("openvino")
# Float outputs of layers: not at issue here.
@pytest.mark.filterwarnings("ignore:export_onnx")
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", None])
@pytest.mark.parametrize("unsigned", [True, False])
def test_files_compute_what_is_simulated(
    target: str | None, unsigned: bool, generator: torch.Generator, path: Path
) -> None:
    model = quantized(generator, unsigned=unsigned)
    example = images(generator)
    torchq.export_onnx(model, example, path, target=target, dynamo=False)
    report = torchq.verify_onnx(model, path, [example])
    assert report.ok, str(report)
    for name, actual in activation_qparams(load_model(path)).items():
        scale, zero_point = quantizers(model)[name].calculate_qparams()
        shift = 128 if not unsigned and not actual.format.signed else 0
        assert actual.scale == scale
        assert actual.zero_point == zero_point + shift
        # The lowest value lies a little below 0, so no zero point is at an end of the codes.
        assert actual.quant_min < actual.zero_point < actual.quant_max


def test_the_runtime_gets_the_same_numbers(
    generator: torch.Generator, path: Path
) -> None:
    q = TensorQuantizer(
        QuantDescriptor(unsigned=True, symmetric=False, amin=-0.17, amax=3.0)
    )
    model = nn.Sequential(q)
    x = torch.linspace(-1, 4, 1001)
    torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    session = onnxruntime.InferenceSession(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(y), model(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [True, False])
def test_few_bits_per_axis_and_both_exporters(
    dynamo: bool, generator: torch.Generator, path: Path
) -> None:
    descriptor = QuantDescriptor(4, unsigned=True, symmetric=False, axis=1)
    model = nn.Sequential(TensorQuantizer(descriptor))
    x = torch.randn(2, 3, 5, generator=generator)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, path, opset=21 if dynamo else 18, dynamo=dynamo)
    session = onnxruntime.InferenceSession(path)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(y), model(x))


def test_power_of_two_scales_are_in_the_file(
    generator: torch.Generator, path: Path
) -> None:
    model = quantized(generator, power_of_two=True, unsigned=True)
    torchq.export_onnx(model, images(generator), path, dynamo=False)
    for actual in activation_qparams(load_model(path)).values():
        assert torch.frexp(actual.scale).mantissa == 0.5
    assert torchq.verify_onnx(model, path, [images(generator)]).ok


def test_tensorrt_refuses_by_name(generator: torch.Generator, path: Path) -> None:
    model = quantized(generator)
    with pytest.raises(
        ExportError,
        match=r"first\.input_quantizer, second\.input_quantizer, head\.input_quantizer: has an "
        r"asymmetric range, and tensorrt takes no zero point but 0",
    ):
        torchq.export_onnx(model, images(generator), path, target="tensorrt")
    assert not (path).exists()


def test_roundings_and_delegates_are_refused(
    generator: torch.Generator, path: Path
) -> None:
    model = quantized(generator, symmetric=True, rounding="half_away")
    with pytest.raises(
        ExportError, match=r"first\.input_quantizer: .* rounding 'half_away'"
    ):
        torchq.export_onnx(model, images(generator), path)
    model = quantized(generator)
    model.get_submodule("first.input_quantizer").delegate = lambda x, quantizer: x
    with pytest.raises(ExportError, match=r"first\.input_quantizer: has a delegate"):
        torchq.export_onnx(model, images(generator), path)
