"""Files in ONNX Runtime's format QOperator, against ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn import QuantConv2d, QuantLinear

onnx = pytest.importorskip("onnx", reason="writes the files")
runtime = pytest.importorskip("onnxruntime", reason="is the reference")
quantization = pytest.importorskip("onnxruntime.quantization", reason="quantizes the files")
helper, TensorProto = onnx.helper, onnx.TensorProto


class Net(nn.Module):
    """Additions, concatenations, products and pooling on codes. Input (N, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.first(x))
        b = self.second(a)
        y = torch.cat([a + b, nn.functional.leaky_relu(b)], 1)
        y = self.third(nn.functional.avg_pool2d(y, 2))
        y = torch.sigmoid(y) * y
        return self.head(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


class OneBatch(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feed: dict[str, Any]) -> None:
        self._feeds = iter([feed])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def run(path: Path, *inputs: Tensor) -> Tensor:
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [info.name for info in session.get_inputs()]
    feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kinds", ["QUInt8 QInt8", "QInt8 QInt8", "QUInt8 QUInt8"])
def test_a_network_on_codes_gives_the_codes_of_onnx_runtime(
    per_channel: bool, kinds: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    source, target = tmp_path / "float.onnx", tmp_path / "codes.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(model, (x,), str(source), dynamo=False, opset_version=13)
    (name,) = [value.name for value in onnx.load(source).graph.input]
    activations, weights = (getattr(quantization.QuantType, kind) for kind in kinds.split())
    quantization.quantize_static(
        source,
        target,
        OneBatch({name: x.numpy()}),
        quant_format=quantization.QuantFormat.QOperator,
        per_channel=per_channel,
        activation_type=activations,
        weight_type=weights,
        extra_options={"ActivationSymmetric": kinds.startswith("QInt8")},
    )
    read = torchq.from_onnx(target)
    with torch.no_grad():
        assert torch.equal(read(x), run(target, x))
    if kinds.endswith(" QInt8"):
        kinds_read = [type(module) for module in read.modules()]
        assert kinds_read.count(QuantConv2d) == 3 and kinds_read.count(QuantLinear) == 1


def operator_file(tmp_path: Path, op_type: str, inputs: list[Any], **attributes: Any) -> Path:
    """Write one operator between a quantized input and a dequantized output."""
    scale, zero = ("scale", torch.tensor(0.03)), ("zero", torch.tensor(120, dtype=torch.uint8))
    constants = {name: value for name, value in [scale, zero, *inputs] if value is not None}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node(
            op_type, [name for name, _ in inputs], ["out"], domain="com.microsoft", **attributes
        ),
        helper.make_node("DequantizeLinear", ["out", "scale", "zero"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value.numpy(), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


CODES, SCALE, ZERO = ("codes", None), ("scale", None), ("zero", None)
WEIGHT = [("w", codes(4, 3)), ("ws", torch.tensor(0.02)), ("wz", torch.tensor(3, dtype=torch.int8))]
BIAS = ("b", codes(3, dtype=torch.int32))
CASES = [
    ("QGemm", [CODES, SCALE, ZERO, *WEIGHT, BIAS, SCALE, ZERO], {}),
    ("QGemm", [CODES, SCALE, ZERO, *WEIGHT, BIAS, SCALE, ZERO], {"alpha": 0.5}),
    ("QLinearSoftmax", [CODES, SCALE, ZERO, SCALE, ZERO], {"axis": -1, "opset": 13}),
    (
        "QLinearWhere",
        [("c", codes(2, 4) > 50), CODES, SCALE, ZERO, ("o", codes(2, 4, dtype=torch.uint8))]
        + [("os", torch.tensor(0.04)), ZERO, SCALE, ZERO],
        {},
    ),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes"), CASES)
def test_single_operators(
    op_type: str, inputs: list[Any], attributes: dict[str, Any], tmp_path: Path
) -> None:
    path = operator_file(tmp_path, op_type, inputs, **attributes)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    # One code: ONNX Runtime multiplies by a rounded quotient of scales.
    torch.testing.assert_close(torchq.from_onnx(path)(x), run(path, x), rtol=0, atol=0.0301)
