"""Pure tensor functions: scales, quantize, dequantize, fake-quantize, and their gradients.

Nothing here holds state or waits for the device.
"""

from torchq.functional.fake_quant import (
    AffineFakeQuantizeFunction,
    FakeQuantizeFunction,
    dequantize,
    fake_quantize,
    fake_quantize_affine,
    learned_fake_quantize,
    quantize,
)
from torchq.functional.gradient import (
    range_gradient_scale,
    scale_gradient,
    straight_through,
)
from torchq.functional.reduce import reduce_amax, reduce_range
from torchq.functional.scale import (
    amax_from_scale,
    compute_dtype,
    is_dead,
    is_dead_range,
    range_from_qparams,
    scale_and_zero_point,
    scale_from_amax,
)

__all__ = [
    "AffineFakeQuantizeFunction",
    "FakeQuantizeFunction",
    "amax_from_scale",
    "compute_dtype",
    "dequantize",
    "fake_quantize",
    "fake_quantize_affine",
    "is_dead",
    "is_dead_range",
    "learned_fake_quantize",
    "quantize",
    "range_from_qparams",
    "range_gradient_scale",
    "reduce_amax",
    "reduce_range",
    "scale_and_zero_point",
    "scale_from_amax",
    "scale_gradient",
    "straight_through",
]
