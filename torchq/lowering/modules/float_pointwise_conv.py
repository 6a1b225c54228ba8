"""The convolution of a single pixel, as in squeeze-and-excitation.

Such a convolution is too small for an integer kernel, whose call takes longer than its work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.lowering.modules.base import dequantized
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.input_checks import smallest_value
from torchq.lowering.ops.epilogues import activation
from torchq.lowering.ops.onednn import Run
from torchq.utils import calls_are_recorded

__all__ = ["FloatPointwiseConv"]

#: The number of weights up to which multiplying floats is faster: reading four times the bytes
#: takes less time than calling the integer kernel.
_MAX_WEIGHTS = 2**17


class FloatPointwiseConv(Int8Conv):
    """A convolution of one pixel, computed in floating point from the rounded input.

    This is what the simulation computes. Anything but one floating-point pixel for each image goes
    to the integer kernel.

    Args:
        layer: an integer convolution for which :meth:`fits` holds; its tensors are shared.
    """

    def __init__(self, layer: Int8Conv) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(layer.variant()))

    @staticmethod
    def fits(layer: nn.Module | None) -> bool:
        """Return True if ``layer`` is a small 1 x 1 convolution that may become this one."""
        if not isinstance(layer, Int8Conv) or layer.pre_quant_scale is not None:
            return False
        codes, params = layer.weight_codes, layer.params
        pointwise = codes.shape[2:] == (1, 1) and params.groups == 1
        padded = layer.border is not None or any(params.padding)
        return pointwise and not padded and codes.numel() <= _MAX_WEIGHTS

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the convolution of ``x``; see :meth:`Int8Conv.forward`."""
        pixel = x.dtype is not torch.uint8 and x.shape[2:] == (1, 1)
        plain = residual is None and self.output_qparams is None
        if not pixel or not plain or calls_are_recorded():
            return super().forward(x, residual)
        smallest_value(x, self.dtype, type(self).__name__)
        run: Run = self._kernel("pixel", self._bind_pixel)
        return run(x)

    def _bind_pixel(self) -> Run:
        """Return the layer as a function of (N, C, 1, 1)."""
        q, name, arguments, dtype = self.input_qparams, self.activation, self.arguments, self.dtype
        bounds = (q.quant_min - q.zero_point, q.quant_max - q.zero_point)
        weight, bias = dequantized(self.weight_codes, self.weight_scale).flatten(1), self.bias

        def run(x: Tensor) -> Tensor:
            flat = x.flatten(1).to(torch.float32)
            rounded = torch.fake_quantize_per_tensor_affine(flat, q.scale, 0, *bounds)
            y = activation(F.linear(rounded, weight, bias), name, arguments)
            return y.to(dtype).view(len(x), len(weight), 1, 1)

        return run

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        _, size, fused = super().summary_row()
        return "float32, one pixel", size, fused
