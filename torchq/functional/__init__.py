"""Pure tensor functions: scales, quantize, dequantize, fake-quantize, and their gradients.

Nothing here holds state or waits for the device.
"""

from torchq.functional.fake_quant import (
    FakeQuantizeFunction,
    LearnedFakeQuantizeFunction,
    dequantize,
    fake_quantize,
    learned_fake_quantize,
    quantize,
)
from torchq.functional.gradient import ScaleGradientFunction, range_gradient_scale, scale_gradient
from torchq.functional.reduce import reduce_amax
from torchq.functional.scale import amax_from_scale, compute_dtype, is_dead, scale_from_amax

__all__ = [
    "FakeQuantizeFunction",
    "LearnedFakeQuantizeFunction",
    "ScaleGradientFunction",
    "amax_from_scale",
    "compute_dtype",
    "dequantize",
    "fake_quantize",
    "is_dead",
    "learned_fake_quantize",
    "quantize",
    "range_gradient_scale",
    "reduce_amax",
    "scale_gradient",
    "scale_from_amax",
]
