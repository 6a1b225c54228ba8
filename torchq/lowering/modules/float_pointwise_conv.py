"""Convolutions of single pixels, as in squeeze-and-excitation: too small for integer kernels, whose calls take longer than the work."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.lowering.modules.base import dequantized
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.ops.epilogues import activation
from torchq.lowering.ops.onednn import Run

__all__ = ["FloatPointwiseConv"]

#: Weights up to which multiplying floats is faster: reading four times the bytes takes less time than the integer kernel's call.
_MOST_WEIGHTS = 2**17


class FloatPointwiseConv(Int8Conv):
    """A convolution whose image is one pixel, computed in floating point from the rounded input: what the simulation computes.

    Args:
        layer: with a 1 x 1 kernel; its tensors are shared.
    """

    def __init__(self, layer: Int8Conv) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(layer.variant()))

    @staticmethod
    def fits(layer: nn.Module | None) -> bool:
        """Whether ``layer`` may become one."""
        if (
            not isinstance(layer, Int8Conv)
            or layer.weight_codes.numel() > _MOST_WEIGHTS
            or layer.pre_quant_scale is not None
        ):
            return False
        return (
            layer.weight_codes.shape[2:] == (1, 1)
            and layer.params.groups == 1
            and layer.border is None
            and not any(layer.params.padding)
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See :class:`Int8Conv`; anything but one floating-point pixel for each image goes to the integer kernel."""
        other = (
            x.dtype is torch.uint8
            or x.shape[2:] != (1, 1)
            or residual is not None
            or self.output_qparams is not None
        )
        if other or torch.compiler.is_compiling():
            return super().forward(x, residual)
        run: Run = self._kernel("pixels", self._bind_pixels)
        return run(x)

    def _bind_pixels(self) -> Run:
        qparams, name, arguments, dtype = (
            self.input_qparams,
            self.activation,
            self.arguments,
            self.dtype,
        )
        bounds = (qparams.quant_min - qparams.zero_point, qparams.quant_max - qparams.zero_point)
        weight, bias = dequantized(self.weight_codes, self.weight_scale).flatten(1), self.bias

        def run(x: Tensor) -> Tensor:
            rounded = torch.fake_quantize_per_tensor_affine(
                x.flatten(1).to(torch.float32), qparams.scale, 0, *bounds
            )
            y = activation(F.linear(rounded, weight, bias), name, arguments)
            return y.to(dtype).view(x.shape[0], weight.shape[0], 1, 1)

        return run

    def summary_row(self) -> tuple[str, int, str]:
        """For :func:`torchq.summary`."""
        _, size, fused = super().summary_row()
        return "float32, one pixel", size, fused
