"""The order of calls of published detector scripts: export, read the graph, share, calibrate.

Such scripts export the model right after the layers were replaced, only to read from the graph
which layers feed one concatenation. Those layers then share a quantizer, so that the runtime
needs no requantization. Only after that the model is calibrated, and exported for good.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq.compat.pytorch_quantization import enable_onnx_export
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.tensor_quant import (
    QuantDescriptor,
    ScaledE4M3Function,
    fake_tensor_quant,
    scaled_e4m3,
)

onnx = pytest.importorskip("onnx")

EXPORTERS = [
    pytest.param(False, id="torchscript"),
    pytest.param(True, id="dynamo"),
]
# The TorchScript exporter and tracing warn about themselves on every call.
pytestmark = pytest.mark.filterwarnings("ignore")


class Branches(nn.Module):
    """Two convolutions of one input, and one that reads their concatenation beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left = quant_nn.QuantConv2d(4, 4, 3, padding=1)
        self.right = quant_nn.QuantConv2d(4, 4, 1)
        self.after_left = quant_nn.QuantConv2d(4, 4, 1)
        self.after_both = quant_nn.QuantConv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        return self.after_both(torch.cat((left, self.right(x)), 1)) + self.after_left(left).mean()


def images(seed: int) -> Tensor:
    return torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def export(model: nn.Module, x: Tensor, path: Path, dynamo: bool) -> Any:
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.onnx.export(model, (x,), str(path), opset_version=19, dynamo=dynamo)
    return onnx.load(str(path))


def convolutions_by_input(file: Any) -> dict[str, list[str]]:
    """Return the names of the convolutions whose quantized input is the same tensor."""
    producers = {name: node for node in file.graph.node for name in node.output}

    def quantize_before(name: str) -> Any:
        node = producers[name]
        while node.op_type != "QuantizeLinear":
            node = producers[node.input[0]]
        return node

    found: dict[str, list[str]] = {}
    for node in file.graph.node:
        if node.op_type == "Conv":
            weight = quantize_before(node.input[1]).input[0]
            source = quantize_before(node.input[0]).input[0]
            found.setdefault(source, []).append(weight.removesuffix(".weight"))
    return found


def quantizers(model: nn.Module) -> list[quant_nn.TensorQuantizer]:
    return [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]


def calibrate(model: nn.Module) -> None:
    for quantizer in quantizers(model):
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        for seed in range(3):
            model(images(seed))
    for quantizer in quantizers(model):
        quantizer.disable_calib()
        quantizer.enable_quant()
        quantizer.load_calib_amax(strict=False)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_rules_read_from_an_uncalibrated_export(tmp_path: Path, dynamo: bool) -> None:
    torch.manual_seed(4)
    model = Branches().eval()
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    pairs = [
        names
        for names in convolutions_by_input(
            export(model, images(0), tmp_path / "rules.onnx", dynamo)
        ).values()
        if len(names) == 2
    ]
    quant_nn.TensorQuantizer.use_fb_fake_quant = False
    assert pairs == [["left", "right"]]
    assert all(quantizer.amax is None for quantizer in quantizers(model))
    for first, second in pairs:
        shared = model.get_submodule(first)._input_quantizer
        model.get_submodule(second)._input_quantizer = shared
    calibrate(model)
    with enable_onnx_export():
        file = export(model, images(0), tmp_path / "model.onnx", dynamo)
    assert sum(node.op_type == "QuantizeLinear" for node in file.graph.node) >= 7
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    x = images(5)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = model(x)
    # The runtime may round a tie to the other code: one step of the output's inputs.
    torch.testing.assert_close(torch.tensor(result), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_an_unknown_range_is_refused_only_on_request(tmp_path: Path, dynamo: bool) -> None:
    model = quant_nn.QuantLinear(6, 8).eval()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    file = export(model, x, tmp_path / "model.onnx", dynamo)
    assert sum(node.op_type == "QuantizeLinear" for node in file.graph.node) == 2
    with enable_onnx_export(), pytest.raises(Exception, match="has not been calibrated"):
        export(model, x, tmp_path / "model.onnx", dynamo)


def test_the_range_of_the_example_is_a_constant(tmp_path: Path) -> None:
    model = quant_nn.TensorQuantizer(QuantDescriptor()).eval()
    x = torch.tensor([0.5, -2.54, 1.0])
    file = export(model, x, tmp_path / "model.onnx", dynamo=False)
    node = next(node for node in file.graph.node if node.op_type == "QuantizeLinear")
    constants = {
        name: onnx.numpy_helper.to_array(value)
        for name, value in [
            *((node.output[0], node.attribute[0].t) for node in file.graph.node if node.attribute),
            *((tensor.name, tensor) for tensor in file.graph.initializer),
        ]
    }
    assert constants[node.input[1]].item() == pytest.approx(2.54 / 127, rel=1e-6)


class Functional(nn.Module):
    """A quantization function called in a forward."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments)


@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (fake_tensor_quant, (torch.tensor(2.0), 8, False, False)),
        (fake_tensor_quant, (torch.tensor([[1.0], [2.0], [0.5]]), 8, False, False)),
        (fake_tensor_quant, (torch.tensor(2.0), 8, True, False)),
        (scaled_e4m3, (torch.tensor(2.0),)),
        (scaled_e4m3, ()),
    ],
    ids=["int8", "int8 channels", "uint8", "fp8", "fp8 plain"],
)
def test_functions_in_a_forward_become_operators(
    tmp_path: Path, dynamo: bool, function: Any, arguments: Any
) -> None:
    x = torch.linspace(-3, 3, 12).reshape(3, 4)
    file = export(Functional(function, *arguments), x, tmp_path / "model.onnx", dynamo)
    names = [node.op_type for node in file.graph.node if node.op_type != "Constant"]
    assert names == ["QuantizeLinear", "DequantizeLinear"]


def test_the_float8_function_has_a_symbolic(tmp_path: Path) -> None:
    x = torch.linspace(-3, 3, 12)
    for arguments in ((torch.tensor(2.0),), ()):
        model = Functional(ScaledE4M3Function.apply, *arguments)
        file = export(model, x, tmp_path / "model.onnx", dynamo=False)
        names = [node.op_type for node in file.graph.node if node.op_type != "Constant"]
        assert names == ["QuantizeLinear", "DequantizeLinear"]
