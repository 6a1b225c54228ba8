"""The ONNX form of the legacy functions: QuantizeLinear and DequantizeLinear for both exporters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.compat.pytorch_quantization.descriptor import NumBits
from torchq.compat.pytorch_quantization.legacy_scale import live_range
from torchq.errors import ExportError
from torchq.formats import E4M3, PerAxis, PerTensor, by_bits
from torchq.functional import fake_quantize, scale_from_amax
from torchq.utils import constant_while_tracing

__all__ = ["export_quantize_dequantize", "write_float8", "write_int8"]


def export_quantize_dequantize(
    inputs: Tensor,
    amax: Tensor,
    num_bits: NumBits,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Quantize and dequantize while ``torch.onnx.is_in_onnx_export()``.

    The TorchScript exporter writes the range as a constant, also one that was computed from the
    traced input. The dynamo exporter writes the arithmetic behind such a range.

    Args:
        inputs: floating point, any shape.
        amax: one element, or a shape that broadcasts and keeps one axis.
        num_bits: the integer width, or (4, 3).
        unsigned: codes start at 0.
        narrow_range: leave out the lowest code of a signed format.

    Returns:
        the dtype and shape of ``inputs``.

    Raises:
        ExportError: FP8 with a range for each channel.
    """
    amax = live_range(amax)
    axes = tuple(d for d in range(amax.dim()) if amax.shape[d] != 1)
    if isinstance(num_bits, tuple):
        if axes:
            raise ExportError(
                f"FP8 export: got amax of shape {tuple(amax.shape)}; "
                "expected a scalar. Quantize per tensor"
            )
        return _export_float8(inputs, amax.reshape(()))
    if num_bits == 0:
        return torch.zeros_like(inputs)
    format = by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)
    if axes:
        return fake_quantize(inputs, amax, format, PerAxis(axes))
    return fake_quantize(inputs, amax.reshape(()), format, PerTensor())


def _export_float8(inputs: Tensor, amax: Tensor) -> Tensor:
    """Quantize to FP8 E4M3 and back, with one range."""
    if not torch.jit.is_tracing():
        return fake_quantize(inputs, amax, E4M3)
    with constant_while_tracing():
        scale = float(scale_from_amax(amax.float(), E4M3))
    if inputs.dtype is torch.float32:
        return _TorchScriptFloat8.apply(inputs, scale)
    return _TorchScriptFloat8.apply(inputs.float(), scale).to(inputs.dtype)


class _TorchScriptFloat8(torch.autograd.Function):
    """FP8 for the TorchScript exporter; see :func:`write_float8`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, scale: float) -> Any:
        return write_float8(g, x, scale)


def write_float8(g: Any, inputs: Any, scale: float) -> Any:
    """Write the quantization to FP8 E4M3 and back into a TorchScript graph.

    From opset 19 on these are the standard operators. Older opsets have none for FP8, so there
    TensorRT's own operators are written, as by the original.

    Args:
        g: the graph context.
        inputs: the graph value to quantize.
        scale: amax / 448.
    """
    constant = g.op("Constant", value_t=torch.tensor(scale, dtype=torch.float32))
    if g.opset >= 19:
        zero = g.op("Constant", value_t=torch.zeros((), dtype=torch.float8_e4m3fn))
        codes = g.op("QuantizeLinear", inputs, constant, zero)
        result = g.op("DequantizeLinear", codes, constant, zero)
    else:
        codes = g.op("trt::TRT_FP8QuantizeLinear", inputs, constant)
        codes.setType(inputs.type().with_dtype(torch.uint8))
        result = g.op("trt::TRT_FP8DequantizeLinear", codes, constant)
    result.setType(inputs.type())
    return result


def write_int8(
    g: Any, inputs: Any, amax: Tensor, num_bits: int, unsigned: bool, narrow_range: bool
) -> Any:
    """Write QuantizeLinear and DequantizeLinear of 8 bits into a TorchScript graph.

    A ``symbolic`` method calls this function.

    Args:
        g: the graph context.
        inputs: the graph value to quantize.
        amax: the range as a tensor, with one element or with one axis longer than 1.
        num_bits: 8.
        unsigned: codes start at 0.
        narrow_range: False, unless unsigned; QuantizeLinear has no narrow range.

    Raises:
        ExportError: another width, a narrow range, or a range with several axes.
    """
    axes = [d for d, size in enumerate(amax.shape) if size != 1]
    if num_bits != 8 or (narrow_range and not unsigned) or len(axes) > 1:
        raise ExportError(
            f"INT8 export: got num_bits={num_bits}, narrow_range={narrow_range} and amax of shape "
            f"{tuple(amax.shape)}; expected 8 bits, the full range and at most one axis"
        )
    format = by_bits(8, unsigned=unsigned)
    scales = scale_from_amax(live_range(amax.detach().float().cpu()), format).reshape(
        -1 if axes else ()
    )
    zeros = torch.zeros(scales.shape, dtype=torch.uint8 if unsigned else torch.int8)
    scale, zero = g.op("Constant", value_t=scales), g.op("Constant", value_t=zeros)
    attributes = {"axis_i": axes[0]} if axes else {}
    codes = g.op("QuantizeLinear", inputs, scale, zero, **attributes)
    result = g.op("DequantizeLinear", codes, scale, zero, **attributes)
    result.setType(inputs.type())
    return result
