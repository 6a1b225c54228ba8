"""What a quantizer does to a tensor: the legacy arithmetic, or QuantizeLinear and DequantizeLinear while exporting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.compat.pytorch_quantization.descriptor import NumBits
from torchq.compat.pytorch_quantization.tensor_quant import fake_tensor_quant, scaled_e4m3
from torchq.errors import ExportError
from torchq.formats import E4M3, Granularity, PerAxis, PerTensor, by_bits
from torchq.functional import fake_quantize, scale_from_amax
from torchq.utils import constant_while_tracing

__all__ = ["quantize_dequantize"]


def quantize_dequantize(
    inputs: Tensor,
    amax: Tensor,
    num_bits: NumBits,
    unsigned: bool,
    narrow_range: bool,
    granularity: Granularity,
) -> Tensor:
    """``inputs`` on the grid, in its dtype.

    Args:
        inputs: floating point.
        amax: of any shape that broadcasts, or one element for each index of the axis.
        num_bits, unsigned, narrow_range: the format.
        granularity: says which axis a vector belongs to.
    """
    with constant_while_tracing():
        if amax.numel() == 1:
            amax = amax.reshape(())
        elif isinstance(granularity, PerAxis):
            amax = granularity.align(amax, inputs.shape)
    if torch.onnx.is_in_onnx_export():
        return _export(inputs, amax, num_bits, unsigned, narrow_range)
    if isinstance(num_bits, tuple):
        return scaled_e4m3(inputs, amax, *num_bits)
    return fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range)


def _export(
    inputs: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool, narrow_range: bool
) -> Tensor:
    axes = tuple(d for d in range(amax.dim()) if amax.shape[d] != 1)
    if isinstance(num_bits, tuple):
        if axes:
            raise ExportError(
                f"FP8 export: got amax of shape {tuple(amax.shape)}; expected a scalar. Quantize per tensor"
            )
        if torch.jit.is_tracing():
            with constant_while_tracing():
                step = float(scale_from_amax(amax.float(), E4M3))
            if inputs.dtype is torch.float32:
                return _LegacyFloat8.apply(inputs, step)
            return _LegacyFloat8.apply(inputs.float(), step).to(inputs.dtype)
        return fake_quantize(inputs, amax, E4M3)
    if num_bits == 0:
        return torch.zeros_like(inputs)
    format = by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)
    return fake_quantize(inputs, amax, format, PerAxis(axes) if axes else PerTensor())


class _LegacyFloat8(torch.autograd.Function):
    """FP8 for the TorchScript exporter: the standard operators from opset 19 on, TensorRT's own before, as the original wrote them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, step: float) -> Any:
        scale = g.op("Constant", value_t=torch.tensor(step, dtype=torch.float32))
        if g.opset >= 19:
            zero = g.op("Constant", value_t=torch.zeros((), dtype=torch.float8_e4m3fn))
            result = g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)
        else:
            codes = g.op("trt::TRT_FP8QuantizeLinear", x, scale)
            codes.setType(x.type().with_dtype(torch.uint8))
            result = g.op("trt::TRT_FP8DequantizeLinear", codes, scale)
        result.setType(x.type())
        return result
