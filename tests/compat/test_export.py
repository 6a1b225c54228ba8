"""ONNX export of legacy models: both exporters, with and without the old context and flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchq.compat.pytorch_quantization import enable_onnx_export
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

onnx = pytest.importorskip("onnx")

# The TorchScript exporter and tracing warn about themselves on every call.
pytestmark = pytest.mark.filterwarnings("ignore")


def calibrated(
    num_bits: Any = 8, per_channel: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Sequential:
    descriptors = {
        "quant_desc_input": QuantDescriptor(num_bits, **options),
        "quant_desc_weight": QuantDescriptor(num_bits, axis=0 if per_channel else None),
    }
    model = (
        nn.Sequential(
            quant_nn.QuantLinear(6, 8, **descriptors),
            nn.ReLU(),
            quant_nn.QuantLinear(8, 4, **descriptors),
        )
        .to(dtype)
        .eval()
    )
    quantizers = [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.enable_calib()
        quantizer.disable_quant()
    with torch.no_grad():
        model(example(dtype))
    for quantizer in quantizers:
        quantizer.disable_calib()
        quantizer.load_calib_amax()
        quantizer.enable_quant()
    return model


def example(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).to(dtype)


def export(
    model: nn.Module, x: torch.Tensor, path: Path, *, dynamo: bool, opset: int = 17, **options: Any
) -> Any:
    if dynamo:
        pytest.importorskip("onnxscript")
        opset = max(opset, 18)  # what this exporter writes; it converts to older ones
    torch.onnx.export(
        model, (x,), str(path), opset_version=opset, input_names=["input"], dynamo=dynamo, **options
    )
    return onnx.load(str(path))


def count(model: Any, *names: str) -> int:
    return sum(node.op_type in names for node in model.graph.node)


def run(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Run without graph optimisations, which would compute in integers with other roundings."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize(
    ("inside", "per_channel"),
    [(True, True), (False, False)],
    ids=["inside-channel", "outside-tensor"],
)
def test_int8(tmp_path: Path, dynamo: bool, inside: bool, per_channel: bool) -> None:
    model = calibrated(per_channel=per_channel)
    path = tmp_path / "model.onnx"
    if inside:
        with enable_onnx_export():
            found = export(model, example(), path, dynamo=dynamo)
    else:
        quant_nn.TensorQuantizer.use_fb_fake_quant = True
        found = export(model, example(), path, dynamo=dynamo)
    assert count(found, "QuantizeLinear") == count(found, "DequantizeLinear") == 4
    assert count(found, "Round", "Clip", "Div") == 0
    with torch.no_grad():
        expected = model(example())
    # Codes are equal up to ties (x * legacy scale against x / scale). One code is 1/127 of a range
    # of about 3, times a weight of 0.4.
    torch.testing.assert_close(run(path, example()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize(
    "options", [{"narrow_range": True, "scale_amax": 0.5}, {"num_bits": 4}], ids=str
)
def test_other_formats(tmp_path: Path, dynamo: bool, options: dict[str, Any]) -> None:
    """Ranges and bounds that int8 does not have are clipped before."""
    model = calibrated(**options)
    found = export(
        model,
        example(),
        tmp_path / "model.onnx",
        dynamo=dynamo,
        opset=21 if dynamo and "num_bits" in options else 17,
    )
    assert count(found, "QuantizeLinear") == 4
    with torch.no_grad():
        torch.testing.assert_close(
            run(tmp_path / "model.onnx", example()), model(example()), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_learned_ranges(tmp_path: Path, dynamo: bool) -> None:
    model = nn.Sequential(
        quant_nn.TensorQuantizer(QuantDescriptor(learn_amax=True, amax=1.5))
    ).eval()
    found = export(model, example(), tmp_path / "model.onnx", dynamo=dynamo)
    assert count(found, "QuantizeLinear") == 1
    torch.testing.assert_close(
        run(tmp_path / "model.onnx", example()), model(example()).detach(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_half_precision(tmp_path: Path, dynamo: bool, low_dtype: torch.dtype) -> None:
    model = calibrated(per_channel=False, dtype=low_dtype)
    found = export(model, example(low_dtype), tmp_path / "model.onnx", dynamo=dynamo)
    assert count(found, "QuantizeLinear") == 4
    if low_dtype is torch.float16:  # onnxruntime multiplies no bfloat16 matrices on the CPU
        with torch.no_grad():
            torch.testing.assert_close(
                run(tmp_path / "model.onnx", example(low_dtype)),
                model(example(low_dtype)),
                rtol=0,
                atol=1e-2,
            )


@pytest.mark.parametrize(
    ("dynamo", "opset", "operators", "dtype"),
    [
        (False, 17, ("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"), torch.float32),
        (False, 17, ("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"), torch.float16),
        (False, 17, ("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"), torch.bfloat16),
        (False, 19, ("QuantizeLinear", "DequantizeLinear"), torch.float32),
        (True, 19, ("QuantizeLinear", "DequantizeLinear"), torch.float32),
    ],
    ids=str,
)
def test_fp8(
    tmp_path: Path, dynamo: bool, opset: int, operators: tuple[str, str], dtype: torch.dtype
) -> None:
    """Before opset 19 there is no standard operator, so TensorRT's own are written."""
    model = calibrated((4, 3), per_channel=False, dtype=dtype)
    with enable_onnx_export():
        found = export(model, example(dtype), tmp_path / "model.onnx", dynamo=dynamo, opset=opset)
    assert [count(found, name) for name in operators] == [4, 4]
    assert {node.domain for node in found.graph.node if node.op_type in operators} == (
        {"trt"} if opset == 17 else {""}
    )
    if opset == 19 and dtype is torch.float32:
        with torch.no_grad():
            torch.testing.assert_close(
                run(tmp_path / "model.onnx", example()), model(example()), rtol=0, atol=1e-5
            )


def test_fp8_with_channels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="expected a scalar"):
        export(
            calibrated((4, 3), per_channel=True), example(), tmp_path / "model.onnx", dynamo=False
        )


def test_uncalibrated_quantizers_are_named(tmp_path: Path) -> None:
    with (
        enable_onnx_export(),
        pytest.raises(RuntimeError, match="Quantizer has not been calibrated"),
    ):
        export(quant_nn.QuantLinear(6, 8), example(), tmp_path / "model.onnx", dynamo=False)
    model = quant_nn.QuantLinear(6, 8)
    for quantizer in (model.input_quantizer, model.weight_quantizer):
        quantizer.disable()
    assert (
        count(export(model, example(), tmp_path / "model.onnx", dynamo=False), "QuantizeLinear")
        == 0
    )
