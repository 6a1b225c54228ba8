"""How a tensor of an ONNX file is quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Quantization"]


@dataclass(frozen=True, eq=False)
class Quantization:
    """How a tensor of a file is quantized.

    Attributes:
        scale: float32, one number or one for each index of ``axis``.
        zero_point: of the element type of the codes, the shape of ``scale``.
        axis: of the scales.
        bits: of the codes, 0 for those of the element type.
    """

    scale: Tensor
    zero_point: Tensor
    axis: int
    bits: int = 0

    def equals(self, other: Quantization) -> bool:
        """Return True if both give the same codes."""
        same = (
            self.zero_point.dtype == other.zero_point.dtype
            and self.bits == other.bits
            and self.scale.shape == other.scale.shape
        )
        same = same and (self.axis == other.axis or self.scale.numel() == 1)
        return (
            same
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )
