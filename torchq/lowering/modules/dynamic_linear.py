"""Integer linear layers that take the range of their input from each call: per token, or per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.errors import ExportError
from torchq.functional.reduce import reduce_amax
from torchq.functional.scale import divisor, scale_from_amax
from torchq.lowering.modules.base import Float32ParamsMixin, dequantized
from torchq.lowering.ops import onednn
from torchq.lowering.ops.schemas import kernel
from torchq.lowering.qparams import SIGNED_ZERO

__all__ = ["DynamicInt8Linear", "range_of_call"]


def range_of_call(x: Tensor, descriptor: QuantDescriptor, layer: str) -> Tensor:
    """The range of each token of ``x``, or of all of it: float32, one number or broadcastable to x with a last size of 1.

    Raises:
        ExportError: the ranges run along the features; the text names ``layer``.
    """
    amax = reduce_amax(x, descriptor.granularity).to(torch.float32)
    if amax.dim() and amax.shape[-1] != 1:
        raise ExportError(
            f"{layer}: got ranges along the features of {tuple(x.shape)}; expected one per token or tensor"
        )
    return amax if descriptor.scale_amax is None else amax * descriptor.scale_amax


class DynamicInt8Linear(Float32ParamsMixin):
    """An integer linear layer whose input scales are found in each call.

    Args:
        weight: int8, (out, in).
        weight_scale: float32, (out,).
        bias: (out,) or None.
        descriptor: of the input: dynamic, one range per tensor or per slice of leading axes (a token).
        dtype: of :attr:`weight`.

    Shape:
        (..., in) floating point -> (..., out), same dtype.
    """

    weight_codes: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        descriptor: QuantDescriptor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.register_buffer("weight_codes", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32))
        self.descriptor = descriptor
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Quantize by the range of ``x``, multiply integers, scale back.

        Raises:
            ExportError: the ranges run along the features.
        """
        d = self.descriptor
        amax = range_of_call(x, d, "DynamicInt8Linear")
        scale = scale_from_amax(amax, d.format)
        zero = SIGNED_ZERO if d.format.signed else 0
        codes = (
            d.format.snap_(x.to(torch.float32) / divisor(amax, scale)).add_(zero).to(torch.uint8)
        )
        y = torch.ops.torchq.int8_linear(
            codes,
            self.weight_codes,
            self.weight_scale,
            None,
            1.0,
            zero,
            1.0,
            0,
            torch.float32,
            "none",
            [],
        )
        y = y.mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight as floating point, made anew: for code that reads a layer's weight, or its dtype or device."""
        return dequantized(self.weight_codes, self.weight_scale).to(self.dtype)

    def _load_from_state_dict(self, *args: Any) -> None:
        onednn.forget(self.weight_codes)  # copied into in place
        super()._load_from_state_dict(*args)

    def summary_row(self) -> tuple[str, int, str]:
        """For :func:`torchq.summary`."""
        size = sum(b.numel() * b.element_size() for b in self.buffers())
        name, problem = kernel(self.weight_codes.device, "linear")
        return (
            f"{name} uint8 x int8 -> float",
            size,
            "; ".join(filter(None, ("the input's range is that of each call", problem))),
        )
