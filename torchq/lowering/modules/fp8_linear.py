"""The FP8 linear layer: a weight of one byte each, and 8-bit products on GPUs that have them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.functional.scale import divisor, scale_from_amax
from torchq.lowering.modules.base import DeployedLayer, dequantized
from torchq.lowering.modules.dynamic_linear import range_of_call
from torchq.lowering.modules.input_checks import require_dtype
from torchq.lowering.ops.fp8 import Fp8Input, Fp8Weights, fp8_linear, fp8_values, obstacle

__all__ = ["Fp8Linear"]


class Fp8Linear(DeployedLayer):
    """A linear layer whose weight and input are FP8 numbers times float32 scales.

    Args:
        weights: of the layer; the bias may have any floating dtype.
        descriptor: of the input: one of the same formats, not both E5M2; one range per tensor, or
            per slice of leading axes (a token) where it is dynamic.
        amax: the input's range, float32 without dimensions; None takes that of each call.
        dtype: of :attr:`weight`.
        pre_quant_scale: multiplies the input first, (in,), or None.

    Shape:
        (..., in) floating point -> (..., out), same dtype. Sums are float32.
    """

    input_scale: Tensor | None
    input_divisor: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        weights: Fp8Weights,
        descriptor: QuantDescriptor,
        amax: Tensor | None,
        dtype: torch.dtype,
        pre_quant_scale: Tensor | None = None,
    ) -> None:
        bias = None if weights.bias is None else weights.bias.detach().to(torch.float32)
        super().__init__(weights.codes, weights.scale, bias, dtype)
        scale = None if amax is None else scale_from_amax(amax, descriptor.format)
        by = None if amax is None or scale is None else divisor(amax, scale)
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_divisor", by)
        self.register_buffer("pre_quant_scale", pre_quant_scale)
        self.descriptor = descriptor
        self.weight_format = weights.format

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` with ``x`` rounded to FP8.

        Raises:
            ExportError: ranges of the call run along the features.
            TypeError: ``x`` has another dtype than the layer.
        """
        require_dtype(x, self.dtype, "Fp8Linear")
        y = x if self.pre_quant_scale is None else x * self.pre_quant_scale.to(x.dtype)
        by, scale = self.input_divisor, self.input_scale
        if by is None or scale is None:
            amax = range_of_call(y, self.descriptor, "Fp8Linear")
            scale = scale_from_amax(amax, self.descriptor.format)
            by = divisor(amax, scale)
        weights = Fp8Weights(self.weight_codes, self.weight_scale, self.weight_format, self.bias)
        return fp8_linear(y, Fp8Input(by, scale, self.descriptor.format.name), weights).to(x.dtype)

    def _dequantized_weight(self) -> Tensor:
        return dequantized(fp8_values(self.weight_codes, self.weight_format), self.weight_scale)

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        problem = obstacle(self.weight_codes.device)
        note = "the input's range is that of each call" if self.input_scale is None else ""
        product = f"{self.descriptor.format} x {self.weight_format} -> float"
        kernel = f"{'reference' if problem else 'scaled_mm'} {product}"
        return kernel, self._size(), "; ".join(filter(None, (note, problem)))

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        out, inner = self.weight_codes.shape
        return f"in={inner}, out={out}, {self.weight_format}, input={self.descriptor}"
