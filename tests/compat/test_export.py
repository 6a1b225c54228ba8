"""ONNX export of legacy models: both exporters, with and without the old context and flag."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.compat.pytorch_quantization import enable_onnx_export
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.tensor_quant import (
    QuantDescriptor,
    ScaledE4M3Function,
    fake_tensor_quant,
    scaled_e4m3,
)

onnx = pytest.importorskip("onnx")

# The TorchScript exporter and tracing warn about themselves on every call.
pytestmark = pytest.mark.filterwarnings("ignore")
EXPORTERS = pytest.mark.parametrize(
    "dynamo", [False, True], ids=["torchscript", "dynamo"]
)


def calibrated(
    num_bits: Any = 8,
    per_channel: bool = True,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Sequential:
    descriptors = {
        "quant_desc_input": QuantDescriptor(num_bits, **options),
        "quant_desc_weight": QuantDescriptor(num_bits, axis=0 if per_channel else None),
    }
    layers = [quant_nn.QuantLinear(*size, **descriptors) for size in ((6, 8), (8, 4))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(dtype).eval()
    calibrate(model, [example(dtype)])
    return model


def quantizers(model: nn.Module) -> list[quant_nn.TensorQuantizer]:
    return [m for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)]


def calibrate(model: nn.Module, batches: list[Tensor]) -> None:
    for quantizer in quantizers(model):
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        for x in batches:
            model(x)
    for quantizer in quantizers(model):
        quantizer.disable_calib()
        quantizer.enable_quant()
        quantizer.load_calib_amax()


def example(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).to(dtype)


def export(
    model: nn.Module, x: Tensor, path: Path, *, dynamo: bool, opset: int = 19
) -> Any:
    if dynamo:
        pytest.importorskip("onnxscript")
    options: Any = {"opset_version": opset, "input_names": ["input"], "dynamo": dynamo}
    torch.onnx.export(
        model,
        (x,),
        str(path),
        **options,
    )
    return onnx.load(str(path))


def count(model: Any, *names: str) -> int:
    return sum(node.op_type in names for node in model.graph.node)


def run(path: Path, x: Tensor) -> Tensor:
    """Run without graph optimisations, which would compute in integers with other roundings."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


@pytest.mark.sample(2)
@EXPORTERS
@pytest.mark.parametrize("inside", [True, False])
def test_int8(tmp_path: Path, dynamo: bool, inside: bool) -> None:
    model = calibrated(per_channel=inside)
    path = tmp_path / "model.onnx"
    quant_nn.TensorQuantizer.use_fb_fake_quant = not inside
    with enable_onnx_export() if inside else nullcontext():
        actual = export(model, example(), path, dynamo=dynamo)
    assert count(actual, "QuantizeLinear") == count(actual, "DequantizeLinear") == 4
    assert count(actual, "Round", "Clip", "Div") == 0
    # Codes are equal up to ties (x * legacy scale against x / scale). One code is 1/127 of a range
    # of about 3, times a weight of 0.4.
    close(path, model, example())


def close(path: Path, model: nn.Module, x: Tensor, atol: float = 1e-5) -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            run(path, x),
            model(x),
            rtol=0,
            atol=atol,
        )


@pytest.mark.sample(2)
@EXPORTERS
@pytest.mark.parametrize(
    "options",
    [
        {"narrow_range": True, "scale_amax": 0.5},
        {"num_bits": 4},
        {"per_channel": False, "dtype": torch.float16},
        {"per_channel": False, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_other_formats(tmp_path: Path, dynamo: bool, options: dict[str, Any]) -> None:
    """Ranges and bounds that int8 does not have are clipped before."""
    model = calibrated(**options)
    x = example(options.get("dtype", torch.float32))
    opset = 21 if dynamo and "num_bits" in options else 19
    actual = export(model, x, tmp_path / "model.onnx", dynamo=dynamo, opset=opset)
    assert count(actual, "QuantizeLinear") == 4
    # Onnxruntime multiplies no such matrices on the CPU.
    if x.dtype is not torch.bfloat16:
        atol = 1e-5 if x.dtype is torch.float32 else 1e-2
        close(tmp_path / "model.onnx", model, x, atol)


@EXPORTERS
def test_learned_ranges(tmp_path: Path, dynamo: bool) -> None:
    learned = QuantDescriptor(learn_amax=True, amax=1.5)
    model = nn.Sequential(quant_nn.TensorQuantizer(learned)).eval()
    actual = export(model, example(), tmp_path / "model.onnx", dynamo=dynamo)
    assert count(actual, "QuantizeLinear") == 1
    close(tmp_path / "model.onnx", model, example(), 1e-6)


TENSORRT = ("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear")
STANDARD = ("QuantizeLinear", "DequantizeLinear")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("dynamo", "opset", "operators", "dtype"),
    [
        *(
            (False, 17, TENSORRT, kind)
            for kind in (torch.float32, torch.float16, torch.bfloat16)
        ),
        *((dynamo, 19, STANDARD, torch.float32) for dynamo in (False, True)),
    ],
    ids=str,
)
def test_fp8(
    tmp_path: Path,
    dynamo: bool,
    opset: int,
    operators: tuple[str, str],
    dtype: torch.dtype,
) -> None:
    """Before opset 19 there is no standard operator, so TensorRT's own are written."""
    model = calibrated((4, 3), per_channel=False, dtype=dtype)
    with enable_onnx_export():
        actual = export(
            model, example(dtype), tmp_path / "model.onnx", dynamo=dynamo, opset=opset
        )
    assert [count(actual, name) for name in operators] == [4, 4]
    assert {node.domain for node in actual.graph.node if node.op_type in operators} == (
        {"trt"} if opset == 17 else {""}
    )
    if opset == 19:
        close(tmp_path / "model.onnx", model, example())


def test_fp8_with_channels_is_refused(tmp_path: Path) -> None:
    model = calibrated((4, 3), per_channel=True)
    with pytest.raises(RuntimeError, match="expected a scalar"):
        export(model, example(), tmp_path / "model.onnx", dynamo=False)


# Scripts export the model right after the layers were replaced, only to read from the graph which
# layers feed one concatenation. Those share a quantizer then; after that comes the calibration.


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
        return (
            self.after_both(torch.cat((left, self.right(x)), 1))
            + self.after_left(left).mean()
        )


def images(seed: int) -> Tensor:
    return torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def convolutions_by_input(file: Any) -> dict[str, list[str]]:
    """Return the names of the convolutions whose quantized input is the same tensor."""
    producers = {name: node for node in file.graph.node for name in node.output}

    def quantize_before(name: str) -> Any:
        node = producers[name]
        while node.op_type != "QuantizeLinear":
            node = producers[node.input[0]]
        return node

    actual: dict[str, list[str]] = {}
    for node in file.graph.node:
        if node.op_type == "Conv":
            weight = quantize_before(node.input[1]).input[0]
            source = quantize_before(node.input[0]).input[0]
            actual.setdefault(source, []).append(weight.removesuffix(".weight"))
    return actual


@pytest.mark.sample(1)
@EXPORTERS
def test_rules_read_from_an_uncalibrated_export(tmp_path: Path, dynamo: bool) -> None:
    torch.manual_seed(4)
    model = Branches().eval()
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    rules = export(
        model,
        images(0),
        tmp_path / "rules.onnx",
        dynamo=dynamo,
    )
    pairs = [
        names for names in convolutions_by_input(rules).values() if len(names) == 2
    ]
    quant_nn.TensorQuantizer.use_fb_fake_quant = False
    assert pairs == [["left", "right"]]
    assert all(quantizer.amax is None for quantizer in quantizers(model))
    for first, second in pairs:
        shared = model.get_submodule(first)._input_quantizer
        model.get_submodule(second)._input_quantizer = shared
    calibrate(model, [images(seed) for seed in range(3)])
    with enable_onnx_export():
        file = export(
            model,
            images(0),
            tmp_path / "model.onnx",
            dynamo=dynamo,
        )
    assert count(file, "QuantizeLinear") >= 7
    # The runtime may round a tie to the other code: one step of the output's inputs.
    close(tmp_path / "model.onnx", model, images(5), atol=0.02)


@EXPORTERS
def test_an_unknown_range_is_refused_only_on_request(
    tmp_path: Path, dynamo: bool
) -> None:
    model = quant_nn.QuantLinear(6, 8).eval()
    x = example()
    file = export(model, x, tmp_path / "model.onnx", dynamo=dynamo)
    assert count(file, "QuantizeLinear") == 2
    with (
        enable_onnx_export(),
        pytest.raises(Exception, match="has not been calibrated"),
    ):
        export(model, x, tmp_path / "model.onnx", dynamo=dynamo)


class Functional(nn.Module):
    """A quantization function called in a forward."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments)


@pytest.mark.sample(7)
@EXPORTERS
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (fake_tensor_quant, (torch.tensor(2.0), 8, False, False)),
        (fake_tensor_quant, (torch.tensor([[1.0], [2.0], [0.5]]), 8, False, False)),
        (fake_tensor_quant, (torch.tensor(2.0), 8, True, False)),
        (scaled_e4m3, (torch.tensor(2.0),)),
        (scaled_e4m3, ()),
        (ScaledE4M3Function.apply, (torch.tensor(2.0),)),
        (ScaledE4M3Function.apply, ()),
    ],
    ids=["int8", "int8 channels", "uint8", "fp8", "fp8 plain", "class", "class plain"],
)
def test_functions_in_a_forward_become_operators(
    tmp_path: Path, dynamo: bool, function: Any, arguments: Any
) -> None:
    if dynamo and function not in (fake_tensor_quant, scaled_e4m3):
        pytest.skip("the symbolic of the class serves the older exporter")
    x = torch.linspace(-3, 3, 12).reshape(3, 4)
    file = export(
        Functional(function, *arguments), x, tmp_path / "model.onnx", dynamo=dynamo
    )
    names = [node.op_type for node in file.graph.node if node.op_type != "Constant"]
    assert names == ["QuantizeLinear", "DequantizeLinear"]


@EXPORTERS
def test_each_quantizer_is_one_pair_in_a_file_that_is_verified(
    dynamo: bool, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    model = calibrated()
    torchq.export_onnx(model, example(), path, dynamo=dynamo, progress=False)
    assert count(onnx.load(str(path)), "QuantizeLinear") == 2
    report = torchq.verify_onnx(model, path, [example()], progress=False)
    assert report.ok, str(report)


def test_a_delegate_takes_the_place_of_what_an_old_quantizer_computes() -> None:
    quantizer = quantizers(calibrated())[0]
    quantizer.delegate = lambda x, _: x + 1
    x = example()
    assert torch.equal(quantizer(x), x + 1)
    quantizer.disable_quant()
    assert torch.equal(quantizer(x), x)


def test_a_file_whose_weights_are_float_is_verified(tmp_path: Path) -> None:
    """ONNX Runtime computes layers in float whose results nothing quantizes; all is said."""
    torch.manual_seed(0)
    layers = [quant_nn.QuantConv2d(3, 4, 3), nn.ReLU(), quant_nn.QuantConv2d(4, 2, 3)]
    model = nn.Sequential(*layers).eval()
    images = torch.rand(2, 3, 8, 8)
    calibrate(model, [images])
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(
        model, images, path, target="onnxruntime", dynamo=False, progress=False
    )
    assert written.coverage.share == 0
    assert torchq.verify_onnx(model, path, [images], progress=False).ok
