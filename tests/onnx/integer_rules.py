"""What ONNX Runtime's integer operators compute, in float64 and float32, one function for each.

The rules were found by comparing codes; a sum of codes is exact, each scale is one float32 number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

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


def dequantize_linear(a: dict[str, Any], codes: Array, scale: Array, zero: Array) -> Array:
    return centered(codes, zero).astype(f32) * scale


def q_linear_conv(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, w, sw, zw, sy, zy = inputs[:8]
    pads = a.get("pads", [0, 0, 0, 0])
    values = F.pad(torch.from_numpy(centered(x, zx)), (pads[1], pads[3], pads[0], pads[2]))
    weight = torch.from_numpy(centered(w, zw.reshape(-1, 1, 1, 1)))
    options = (a.get("strides", [1, 1]), 0, a.get("dilations", [1, 1]), a.get("group", 1))
    sums = F.conv2d(values, weight, None, *options).numpy()
    if len(inputs) > 8:
        sums = sums + inputs[8].reshape(-1, 1, 1)
    return requantized(sums, ((sx * sw) / sy).reshape(-1, 1, 1), zy)


def q_gemm(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, w, sw, zw, bias, sy, zy = inputs
    shape = (-1, 1) if a.get("transB") else (1, -1)
    left, right = centered(x, zx), centered(w, zw.reshape(shape))
    sums = (left.T if a.get("transA") else left) @ (right.T if a.get("transB") else right)
    return requantized(sums + bias, (sx * sw) / sy, zy)


def mat_mul_integer_to_float(a: dict[str, Any], *inputs: Array) -> Array:
    x, w, sx, sw, zx, zw = inputs[:6]
    product = (centered(x, zx) @ centered(w, zw)).astype(f32) * (sx * sw)
    return product + inputs[6] if len(inputs) > 6 else product


def q_linear_add(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, y, sy, zy, sz, zz = inputs
    first, second = sx / sz, sy / sz
    offset = f32(zz) - (first * f32(zx) + second * f32(zy))
    # float64 holds products and sums of such numbers exactly: these are fused multiply-adds.
    total = (x.astype(np.float64) * first + offset).astype(f32)
    total = (y.astype(np.float64) * second + total).astype(f32)
    return saturated(np.rint(total), np.zeros_like(zz))


def q_linear_mul(a: dict[str, Any], *inputs: Array) -> Array:
    x, sx, zx, y, sy, zy, sz, zz = inputs
    return requantized(centered(x, zx) * centered(y, zy), (sx * sy) / sz, zz)


def q_linear_concat(a: dict[str, Any], scale: Array, zero: Array, *parts: Array) -> Array:
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
