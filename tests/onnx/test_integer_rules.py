"""The integer operators of ONNX Runtime compute by the rules that the simulation relies on.

A failure says that this version computes otherwise: then biases, exact sums and what `verify_onnx`
allows are to be looked at again. The rules were found by comparing codes; a sum of codes is exact,
each scale is one float32 number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Residual, calibrated
from torchq.runtimes.onnxruntime import Session

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


# What each operator computes, in float64 and float32.

Array = np.ndarray[Any, Any]
f32 = np.float32


def saturated(rounded: Array, zero_point: Array) -> Array:
    """Return whole numbers moved by the zero point, as codes of its type."""
    bounds = np.iinfo(zero_point.dtype)
    moved = rounded.astype(np.float64) + float(zero_point)
    return np.clip(moved, bounds.min, bounds.max).astype(zero_point.dtype)


def requantized(sums: Array, ratio: Array, zero_point: Array) -> Array:
    """Return codes of exact sums: one float32 product, rounded half to even."""
    return saturated(np.rint(sums.astype(f32) * ratio.astype(f32)), zero_point)


def centered(codes: Array, zero_point: Array) -> Array:
    return codes.astype(np.float64) - zero_point.astype(np.float64)


def quantize_linear(a: dict[str, Any], x: Array, scale: Array, zero: Array) -> Array:
    return saturated(np.rint(x.astype(f32) / scale), zero)


def dequantize_linear(
    a: dict[str, Any], codes: Array, scale: Array, zero: Array
) -> Array:
    return centered(codes, zero).astype(f32) * scale


def q_linear_conv(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, w, sw, zw, sy, zy = inputs[:8]
    pads = a.get("pads", [0, 0, 0, 0])
    values = F.pad(
        torch.from_numpy(centered(x, zx)), (pads[1], pads[3], pads[0], pads[2])
    )
    weight = torch.from_numpy(centered(w, zw.reshape(-1, 1, 1, 1)))
    options = (
        a.get("strides", [1, 1]),
        0,
        a.get("dilations", [1, 1]),
        a.get("group", 1),
    )
    sums = F.conv2d(values, weight, None, *options).numpy()
    if len(inputs) > 8:
        sums = sums + inputs[8].reshape(-1, 1, 1)
    return requantized(sums, ((sx * sw) / sy).reshape(-1, 1, 1), zy)


def q_gemm(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, w, sw, zw, bias, sy, zy = inputs
    shape = (-1, 1) if a.get("transB") else (1, -1)
    left = centered(x, zx)
    right = centered(w, zw.reshape(shape))
    sums = (left.T if a.get("transA") else left) @ (
        right.T if a.get("transB") else right
    )
    return requantized(sums + bias, (sx * sw) / sy, zy)


def mat_mul_integer_to_float(a: dict[str, Any], *inputs: Array) -> Array:
    x, w, sx, sw, zx, zw = inputs[:6]
    product = (centered(x, zx) @ centered(w, zw)).astype(f32) * (sx * sw)
    return product + inputs[6] if len(inputs) > 6 else product


def q_linear_add(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, y, sy, zy, sz, zz = inputs
    first = sx / sz
    second = sy / sz
    offset = f32(zz) - (first * f32(zx) + second * f32(zy))
    # float64 holds products and sums of such numbers exactly: these are fused multiply-adds.
    total = (x.astype(np.float64) * first + offset).astype(f32)
    total = (y.astype(np.float64) * second + total).astype(f32)
    return saturated(np.rint(total), np.zeros_like(zz))


def q_linear_mul(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, y, sy, zy, sz, zz = inputs
    return requantized(
        centered(x, zx) * centered(y, zy),
        (sx * sy) / sz,
        zz,
    )


def q_linear_concat(
    a: dict[str, Any], scale: Array, zero: Array, *parts: Array
) -> Array:
    moved = []
    for x, sx, zx in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        same = sx == scale and zx == zero
        values = dequantize_linear({}, x, sx, zx)
        moved.append(x if same else quantize_linear({}, values, scale, zero))
    return np.concatenate(moved, a["axis"])


def q_linear_global_average_pool(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, sy, zy = inputs
    axes = (1, 2) if a.get("channels_last") else (2, 3)
    count = np.prod([x.shape[axis] for axis in axes])
    sums = centered(x, zx).sum(axes, keepdims=True)
    return requantized(sums, sx / (sy * f32(count)), zy)


RULES: dict[str, Callable[..., Array]] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "QLinearConv": q_linear_conv,
    "QGemm": q_gemm,
    "MatMulIntegerToFloat": mat_mul_integer_to_float,
    "QLinearAdd": q_linear_add,
    "QLinearMul": q_linear_mul,
    "QLinearConcat": q_linear_concat,
    "QLinearGlobalAveragePool": q_linear_global_average_pool,
}


class Mobile(nn.Module):
    """A depthwise convolution with squeeze-and-excitation, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2)
        self.project = nn.Conv2d(32, 16, 1)
        self.depthwise = nn.Conv2d(32, 32, 5, padding=2, groups=32)
        self.squeeze = nn.Conv2d(32, 8, 1)
        self.excite = nn.Conv2d(8, 32, 1)
        self.first = nn.Linear(16, 24)
        self.last = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.depthwise(nn.functional.hardswish(self.stem(x))))
        scale = nn.functional.adaptive_avg_pool2d(x, 1)
        x = x * nn.functional.hardsigmoid(self.excite(self.squeeze(scale).relu()))
        return self.last(self.first(self.project(x).mean((2, 3))).relu())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("network", [Residual, Mobile])
def test_integer_operators_follow_the_rules(
    network: type[nn.Module], symmetric: bool, path: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 24, 24)
    config = torchq.recipes.int8(symmetric=symmetric)
    model = calibrated(
        network().eval(), x, config=config, target="onnxruntime", example=x[:1]
    )
    torchq.export_onnx(model, x[:1], path, target="onnxruntime", dynamo=False)
    seen = computed(path, x, tmp_path / "optimized.onnx")
    assert sum(seen.values()) == 0, seen
    expected = {"QLinearConv", "QuantizeLinear"}
    expected |= (
        {"QLinearAdd", "QLinearConcat"} if network is Residual else {"QLinearMul"}
    )
    assert expected <= set(seen)


def computed(path: Path, x: Tensor, optimized: Path) -> Counter[str]:
    """Return by operator how many numbers differ from the rules, given the runtime's own inputs."""
    Session(path, optimize=True, save_optimized=optimized)
    model = onnx.load(optimized)
    nodes = [node for node in model.graph.node if node.op_type in RULES]
    names = {name for node in nodes for name in (*node.input, *node.output)}
    made = {name for node in model.graph.node for name in node.output}
    known = {value.name for value in model.graph.output}
    for name in sorted((names & made) - known):
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    session = onnxruntime.InferenceSession(model.SerializeToString(), plain_options())
    outputs = [value.name for value in session.get_outputs()]
    arrays: dict[str, Any] = {session.get_inputs()[0].name: x.numpy()}
    arrays |= {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    actual = session.run(outputs, {session.get_inputs()[0].name: x.numpy()})
    arrays |= dict(zip(outputs, actual, strict=True))
    wrong: Counter[str] = Counter()
    for node in nodes:
        attributes = {
            a.name: onnx.helper.get_attribute_value(a) for a in node.attribute
        }
        rule = RULES[node.op_type](
            attributes, *(arrays[name] for name in node.input if name)
        )
        wrong[node.op_type] += int(np.sum(rule != arrays[node.output[0]]))
    return wrong


def plain_options() -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    options.intra_op_num_threads = 1
    return options
