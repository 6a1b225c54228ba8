"""The quantization of a tensor by a legacy quantizer: legacy arithmetic, or ONNX operators."""

from __future__ import annotations

from torch import Tensor

from torchq.compat.pytorch_quantization.descriptor import NumBits
from torchq.compat.pytorch_quantization.tensor_quant import fake_tensor_quant, scaled_e4m3
from torchq.formats import Granularity, PerAxis
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
    """Return ``inputs`` quantized and dequantized, in its dtype.

    Args:
        inputs: floating point, any shape.
        amax: any shape that broadcasts, or one element for each index of the axis.
        num_bits: the integer width, or (4, 3).
        unsigned: codes start at 0.
        narrow_range: leave out the lowest code of a signed format.
        granularity: the axis that a one-dimensional amax belongs to.
    """
    with constant_while_tracing():
        if amax.numel() == 1:
            amax = amax.reshape(())
        elif isinstance(granularity, PerAxis):
            amax = granularity.align(amax, inputs.shape)
    if isinstance(num_bits, tuple):
        return scaled_e4m3(inputs, amax, *num_bits)
    return fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range)
