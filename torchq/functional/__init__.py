"""Pure tensor functions: amax <-> step, quantize, dequantize, fake-quantize, and their gradients.

May import errors, utils and formats. Nothing here holds state or synchronises with the host.
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
from torchq.functional.scale import TINY, amax_from_step, compute_dtype, step_from_amax
from torchq.functional.seed import FakeTensorQuantFunction, TensorQuantFunction, fake_tensor_quant, tensor_quant

__all__ = [
    "TINY",
    "FakeQuantizeFunction",
    "FakeTensorQuantFunction",
    "LearnedFakeQuantizeFunction",
    "ScaleGradientFunction",
    "TensorQuantFunction",
    "amax_from_step",
    "compute_dtype",
    "dequantize",
    "fake_quantize",
    "fake_tensor_quant",
    "learned_fake_quantize",
    "quantize",
    "range_gradient_scale",
    "reduce_amax",
    "scale_gradient",
    "step_from_amax",
    "tensor_quant",
]
