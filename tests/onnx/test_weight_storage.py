"""Types in which files hold weights, and models in half precision."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, graph_of
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ExportError
from torchq.onnx.ir import (
    add_initializer,
    is_constant,
    onnx_ir,
    remove_unused,
    value_of,
)
from torchq.onnx.passes.pairs import merge_duplicates
from torchq.runtimes import RUNTIMES

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def export(model: nn.Module, x: Tensor, path: Path) -> dict[str, int]:
    """Write the model for ONNX Runtime; return the types of its stored weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    return {t.name: t.data_type for t in onnx.load(str(path)).graph.initializer}


@pytest.mark.parametrize("unsigned", [False, True])
# Unsigned weights are legal.
@pytest.mark.filterwarnings("ignore:.*got negative values")
def test_four_bit_convolutions_run_on_integers(unsigned: bool, path: Path) -> None:
    """Codes of 4 bits are stored in 8 bits; in 4 bits such a file took 50 times as long."""
    x = torch.randn(2, 8, 8, 8)
    weight = QuantDescriptor(4, axis=0, unsigned=unsigned)
    config = QuantConfig(
        (Rule("type:*Conv2d", input=QuantDescriptor(), weight=weight),)
    )
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    net.append(torchq.nn.QuantIdentity(input_descriptor=QuantDescriptor(unsigned=True)))
    model = calibrated(net, x, config=config, target="onnxruntime", example=x)
    kinds = export(model, x, path)
    wanted = onnx.TensorProto.UINT8 if unsigned else onnx.TensorProto.INT8
    assert (
        kinds["0.weight_quantizer/weight"]
        == kinds["2.weight_quantizer/weight"]
        == wanted
    )
    counts = torchq.inspect_onnx(path).counts
    assert counts["QLinearConv"] == 2
    assert torchq.verify_onnx(model, path, [x]).ok


class Mixed(nn.Module):
    """Convolutions with float results: before a GELU, a norm and a signed range."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.depthwise = nn.Conv2d(channels, channels, 3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.last = nn.Conv2d(channels, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(nn.functional.gelu(self.stem(x)))
        return self.last(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_convolutions_in_float_have_float_weights(path: Path) -> None:
    """A DequantizeLinear in front of a float convolution makes it slower than in float32."""
    x = torch.randn(2, 3, 12, 12)
    model = calibrated(Mixed(), x, target="onnxruntime")
    kinds = export(model, x, path)
    for layer in ("stem", "depthwise", "last"):
        assert kinds[f"{layer}.weight_quantizer/float weight"] == onnx.TensorProto.FLOAT
    report = torchq.inspect_onnx(path)
    kinds_in_float = Counter(node.kind for node in report.fallbacks)
    assert kinds_in_float["Conv"] == 3
    assert all(
        "its weight" in node.reason for node in report.fallbacks if node.kind == "Conv"
    )
    verified = torchq.verify_onnx(model, path, [x])
    assert verified.ok and verified.coverage is not None
    assert verified.coverage.share == 0 and len(verified.coverage.float_kernels) == 3
    assert (
        "this file computes in float: 3 of its layers are quantized and have float"
        in (str(verified))
    )


def test_with_an_example_convolutions_return_codes(path: Path) -> None:
    """The last one returns its result to the caller; 8 depthwise channels are faster in float."""
    x = torch.randn(2, 3, 12, 12)
    model = calibrated(Mixed(8), x, target="onnxruntime", example=x)
    kinds = export(model, x, path)
    floats = [name for name in kinds if name.endswith("/float weight")]
    assert floats == ["last.weight_quantizer/float weight"]
    assert torchq.inspect_onnx(path).counts["QLinearConv"] == 1
    assert torchq.verify_onnx(model, path, [x, torch.randn(2, 3, 12, 12)]).ok


def test_a_changed_float_weight_is_named(path: Path) -> None:
    x = torch.randn(2, 3, 12, 12)
    model = calibrated(Mixed(), x, target="onnxruntime")
    export(model, x, path)
    file = onnx.load(str(path))
    (tensor,) = [
        t for t in file.graph.initializer if t.name.startswith("depthwise.weight")
    ]
    changed = onnx.numpy_helper.to_array(tensor).copy()
    changed[0, 0, 0, 0] *= 1.001
    tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
    onnx.save(file, str(path))
    report = torchq.verify_onnx(model, path, [x])
    (found,) = [layer for layer in report.layers if not layer.ok]
    assert (found.name, found.differ) == ("depthwise.weight_quantizer", 1)


def small(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    return nn.Sequential(*layers).to(dtype).eval()


class HalfInside(nn.Module):
    """A network that is float outside, and half inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small(torch.float16)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x.half()).float()
        return self.head(y), y


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:export_onnx")
@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_a_right_file_of_a_half_model_agrees(target: str | None, path: Path) -> None:
    """A code that float16 rounds to the other side is a tie; another bias is an error."""
    model = small(torch.float16)
    x = torch.randn(16, 3, 8, 8, dtype=torch.float16)
    torchq.quantize_(model, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, path, target=target, dynamo=False)
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok, str(report)
    assert any(layer.differ for layer in report.layers)
    assert model[0].bias is not None
    with torch.no_grad():
        model[0].bias[3] += 0.1 * model[2].input_quantizer.amax.half()
    changed = torchq.verify_onnx(model, path, [x])
    assert not changed.ok
    wrong = [layer for layer in changed.layers if not layer.ok]
    assert [layer.name for layer in wrong] == ["0.bias", "2.input_quantizer"]
    assert wrong[1].layers == ("0",)


@pytest.mark.slow
def test_a_right_file_of_a_model_that_is_half_inside_agrees(path: Path) -> None:
    x = torch.randn(16, 3, 8, 8)
    model = calibrated(HalfInside(), x)
    torchq.export_onnx(model, x, path, dynamo=False)
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok, str(report)


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.sample(4)
# The layers are no good for the target.
@pytest.mark.filterwarnings("ignore:export_onnx")
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt", "qnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_that_a_runtime_cannot_compute_in_are_refused(
    dtype: torch.dtype, target: str, path: Path
) -> None:
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    model = calibrated(small(dtype), x, target=target, example=x)
    if dtype in RUNTIMES[target].file.float_types:
        torchq.export_onnx(model, x, path, target=target, dynamo=False)
        assert onnx.load(path).graph.input[0].type.tensor_type.elem_type == 16
        return
    message = rf"0\.weight: is {str(dtype)[6:]}; expected float32, float16.*\.float\(\)"
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(model, x, path, target=target, dynamo=False)
    assert not path.exists()
    single = copy.deepcopy(model).float()
    torchq.export_onnx(single, x.float(), path, target=target, dynamo=False)
    assert torchq.verify_onnx(single, path, [x.float()]).ok


class Cast(nn.Sequential):
    """A float model of inputs in another type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def test_inputs_that_numpy_cannot_hold_are_not_compared(path: Path) -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    model = calibrated(Cast(nn.Linear(6, 6)), x, target="onnxruntime")
    torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    with pytest.raises(
        ExportError, match=r"has bfloat16 for the input 'x'; expected a type that"
    ):
        torchq.verify_onnx(model, path, [x])


@pytest.mark.parametrize("name", ["INT8", "UINT8", "INT4", "UINT4"])
def test_passes_of_onnx_ir_keep_every_code(name: str) -> None:
    """All codes of a type, stored twice: merging, removal and saving change none of them."""
    dtype = onnx_ir.DataType[name]
    bits = 4 if name.endswith("4") else 8
    low = 0 if name.startswith("U") else -(2 ** (bits - 1))
    # An odd number: half a byte is left over.
    codes = torch.arange(low, low + 2**bits)[:-1]
    codes = codes.to(torch.uint8 if name.startswith("U") else torch.int8)
    model = graph_of(("Identity", ["x"], ["y"], {}), stored={}, shape=[1])
    values = [add_initializer(model.graph, f"w{i}", codes, dtype) for i in range(2)]
    add_initializer(model.graph, "unused", codes, dtype)
    for i, value in enumerate(values):
        model.graph.append(onnx_ir.node("Cast", [value], {"to": 1}, name=f"cast{i}"))
        model.graph.outputs.append(model.graph[-1].outputs[0])
    merge_duplicates(model)
    remove_unused(model)
    assert list(model.graph.initializers) == ["w0"]
    loaded = onnx_ir.from_proto(onnx_ir.to_proto(model))
    (stored,) = loaded.graph.initializers.values()
    assert is_constant(stored) and torch.equal(value_of(stored), codes)
