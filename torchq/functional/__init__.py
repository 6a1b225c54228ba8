"""Pure tensor functions: scales, quantize, dequantize, fake-quantize, and their gradients.

Nothing here holds state or waits for the device.
"""

from torchq.functional.code_grid import CodeGrid
from torchq.functional.fake_quant import (
    AffineFakeQuantizeFunction,
    FakeQuantizeFunction,
    dequantize,
    fake_quantize,
    fake_quantize_affine,
    learned_fake_quantize,
    quantize,
    quantize_affine,
)
from torchq.functional.fixed import FixedFakeQuantize
from torchq.functional.gradient import (
    range_gradient_scale,
    scale_gradient,
    straight_through,
)
from torchq.functional.qparams import QParams
from torchq.functional.range import Range, reduce_amax
from torchq.functional.scale import compute_dtype, scale_from_amax

__all__ = [
    "AffineFakeQuantizeFunction",
    "CodeGrid",
    "FakeQuantizeFunction",
    "FixedFakeQuantize",
    "QParams",
    "Range",
    "compute_dtype",
    "dequantize",
    "fake_quantize",
    "fake_quantize_affine",
    "learned_fake_quantize",
    "quantize",
    "quantize_affine",
    "range_gradient_scale",
    "reduce_amax",
    "scale_from_amax",
    "scale_gradient",
    "straight_through",
]
