"""Files in the format QOperator: read as pairs, with the codes that ONNX Runtime computes."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchq
from tests.frontends.onnx_writer import Writer, run_reference
from torchq import nn as qnn
from torchq.errors import FrontendError
from torchq.nn import TensorQuantizer

onnx = pytest.importorskip("onnx", reason="writes the files")
MICROSOFT = {"domain": "com.microsoft"}


def network() -> Any:
    """Write a network with every operator that the quantizer of ONNX Runtime has a form for."""
    w = Writer(17)
    stem = w.node("Relu", w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8))
    y = w.node("Add", stem, w.node("LeakyRelu", w.conv(stem, 8, 8), alpha=0.1))
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    mean = w.node("AveragePool", y, **window)
    gated = w.node("Mul", w.node("MaxPool", y, **window), w.node("Sigmoid", mean))
    y = image = w.conv(w.node("Concat", gated, mean, axis=1), 16, 8)
    y = w.node(
        "Transpose", w.node("Reshape", y, w.constant([0, 8, 64])), perm=[0, 2, 1]
    )
    keys = w.node("MatMul", y, w.random(8, 8))
    y = w.node("MatMul", keys, w.node("Transpose", y, perm=[0, 2, 1]))
    y = w.node("MatMul", w.node("Softmax", y, axis=-1), keys)
    y = w.node("Transpose", y, perm=[0, 2, 1])
    y = w.node("Add", w.node("Reshape", y, w.constant([0, 8, 8, 8])), image)
    y = w.node("Flatten", w.node("GlobalAveragePool", y))
    return w.model(w.node("Gemm", y, w.random(8, 5), w.random(5)))


def images(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, 17, 17, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("per_channel", [False, True])
def test_what_the_quantizer_writes_is_adopted(
    per_channel: bool, tmp_path: Path
) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization", reason="writes it")
    batches = iter([{"x": images(seed).numpy()} for seed in range(3)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> Any:
            return next(batches, None)

    onnx.save(network(), tmp_path / "float.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_static(
            tmp_path / "float.onnx",
            tmp_path / "codes.onnx",
            Reader(),
            quant_format=quantization.QuantFormat.QOperator,
            per_channel=per_channel,
            reduce_range=True,
        )
    model = onnx.load(tmp_path / "codes.onnx")
    assert sum(node.op_type.startswith("QLinear") for node in model.graph.node) > 10
    read = torchq.from_onnx(tmp_path / "codes.onnx")
    modules = list(read.modules())
    assert sum(isinstance(module, qnn.QuantConv2d) for module in modules) == 3
    assert sum(isinstance(module, qnn.QuantLinear) for module in modules) == 2
    # Nothing is left that computes on codes.
    assert not any("quantize_linear" in str(node.target) for node in read.graph.nodes)
    x = images(7)
    with torch.no_grad():
        got = read(x)
    (expected,) = run_reference(model, {"x": x})
    step = float(modules_scale(read))
    assert float((got - expected).abs().max()) <= 1.01 * step
    again = tmp_path / "again.onnx"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*quantized for no target")
        torchq.export_onnx(read, x, again)
    assert (
        float((run_reference(str(again), {"x": x})[0] - got).abs().max()) <= 1.01 * step
    )


def modules_scale(read: torch.nn.Module) -> torch.Tensor:
    """Return the scale of the last quantizer, which is that of the output."""
    quantizers = [m for m in read.modules() if isinstance(m, TensorQuantizer)]
    assert isinstance(read, torch.fx.GraphModule)
    (output,) = (node for node in read.graph.nodes if node.op == "output")
    last = read.get_submodule(str(output.args[0].target))
    assert last in quantizers
    return last.calculate_qparams()[0]  # type: ignore[operator, no-any-return]


def qparams(w: Writer, scale: float, zero_point: int) -> tuple[str, str]:
    """Store a scale and a zero point of uint8."""
    return w.weight(torch.tensor(scale)), w.weight(torch.tensor(zero_point).byte())


FORMS: dict[str, dict[str, Any]] = {
    "QLinearAdd": {"inputs": 2},
    "QLinearMul": {"inputs": 2},
    "QLinearSigmoid": {},
    "QLinearLeakyRelu": {"alpha": 0.2},
    "QLinearSoftmax": {"axis": 1, "opset": 17},
    "QLinearGlobalAveragePool": {},
    "QLinearAveragePool": {
        "kernel_shape": [3, 2],
        "strides": [2, 1],
        "pads": [1, 0, 0, 1],
        "count_include_pad": 1,
    },
    "QLinearConcat": {"inputs": 2, "axis": 1},
    "QLinearWhere": {"inputs": 2},
    "QLinearConv": {"kernel_shape": [3, 3], "group": 2, "pads": [1, 1, 0, 0]},
    "QLinearMatMul": {"inputs": 2},
}


def one_form(op_type: str, options: dict[str, Any]) -> Any:
    """Write one operator on codes between the nodes that make and read them."""
    w = Writer(17)
    options = dict(options)
    x = w.input("x", [2, 4, 5, 5])
    parts: list[str] = []
    for number in range(options.pop("inputs", 1)):
        own = qparams(w, 0.02 + 0.01 * number, 120 + 5 * number)
        part = x if number == 0 else w.node("Neg", x)
        parts += [w.node("QuantizeLinear", part, *own), *own]
    result = qparams(w, 0.03, 117)
    domain = {} if op_type in ("QLinearConv", "QLinearMatMul") else MICROSOFT
    if op_type == "QLinearConv":
        codes = torch.randint(-60, 60, (6, 2, 3, 3), generator=w.generator).char()
        scales = w.weight(torch.rand(6, generator=w.generator) / 500 + 1e-3)
        parts += [w.weight(codes), scales, w.weight(torch.zeros(6).char())]
        bias = torch.randint(-999, 999, (6,), generator=w.generator).int()
        parts += [*result, w.weight(bias)]
    elif op_type == "QLinearConcat":
        parts = [*result, *parts]
    elif op_type == "QLinearWhere":
        parts = [w.node("Greater", x, w.constant(0.1)), *parts, *result]
    else:
        parts += result
    y = w.node(op_type, *parts, **domain, **options)
    return w.model(w.node("DequantizeLinear", y, *result))


@pytest.mark.parametrize("op_type", FORMS)
def test_operators_on_codes(op_type: str) -> None:
    """Equal codes but for few that lie between two of them, which are one off."""
    model = one_form(op_type, FORMS[op_type])
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    read = torchq.from_onnx(model)
    with torch.no_grad():
        got = read(x)
    (expected,) = run_reference(model, {"x": x})
    off = ((got - expected) / 0.03).round().abs()
    assert got.shape == expected.shape
    assert float(off.max()) <= 1
    # The kernel of Softmax divides whole numbers.
    few = 0.1 if op_type == "QLinearSoftmax" else 0.02
    assert float((off > 0).float().mean()) <= few
    # The file's own quantizer in front, and the one behind.
    assert sum(isinstance(m, TensorQuantizer) for m in read.modules()) >= 2


def test_codes_that_are_moved_stay_between_pairs() -> None:
    w = Writer(17)
    pair = qparams(w, 0.02, 100)
    y = w.node("QuantizeLinear", w.input("x", [1, 2, 6, 6]), *pair)
    y = w.node("QLinearSigmoid", y, *pair, *pair, **MICROSOFT)
    parts = w.node("Split", y, w.constant([2, 4]), outputs=2, axis=2)
    size = w.weight(torch.tensor([1.0, 1.0, 2.0, 2.0]))
    upper = w.node("Resize", parts[0], "", size, mode="nearest")
    lower = w.node("MaxPool", parts[1], kernel_shape=[2, 2], strides=[2, 2])
    lower = w.node("Transpose", lower, perm=[0, 1, 3, 2])
    ends = [w.node("DequantizeLinear", part, *pair) for part in (upper, lower)]
    model = w.model(*ends)
    read = torchq.from_onnx(model)
    assert not any("quantize_linear" in str(node.target) for node in read.graph.nodes)
    x = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for got, expected in zip(read(x), run_reference(model, {"x": x}), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("op_type", "options", "text"),
    [
        ("QLinearGlobalAveragePool", {"channels_last": 1}, "its channels are last"),
        ("QLinearSoftmax", {"axis": 1, "opset": 11}, "it is meant as in opset 11"),
    ],
)
def test_what_pairs_cannot_say_is_refused(
    op_type: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(FrontendError, match=f"{op_type} '.*': {text}"):
        torchq.from_onnx(one_form(op_type, options))


def test_a_matrix_product_has_scales_of_rows_and_columns() -> None:
    w = Writer(17)
    own = qparams(w, 0.02, 120)
    codes = w.node("QuantizeLinear", w.input("x", [3, 4]), *own)
    weight = torch.randint(-60, 60, (4, 5), generator=w.generator).char()
    points = w.weight(torch.zeros(5).char())
    result = qparams(w, 0.03, 117)
    scales = torch.rand(5, generator=w.generator) / 100 + 1e-3

    def model(stored: torch.Tensor) -> Any:
        inner = Writer(17)
        vars(inner).update({k: v if k == "opset" else list(v) for k, v in _parts(w)})
        parts = inner.weight(weight, "w"), inner.weight(stored, "s"), points
        y = inner.node("QLinearMatMul", codes, *own, *parts, *result)
        return inner.model(inner.node("DequantizeLinear", y, *result))

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    read = torchq.from_onnx(model(scales))
    (expected,) = run_reference(model(scales), {"x": x})
    assert np.abs((read(x).detach() - expected).numpy()).max() <= 0.0301
    with pytest.raises(FrontendError, match=r"its scales 's' have the sizes \[1, 5\]"):
        torchq.from_onnx(model(scales.view(1, 5)))


def _parts(w: Writer) -> Any:
    return ((k, v) for k, v in vars(w).items() if k != "generator")
