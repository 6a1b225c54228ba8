"""How a tensor of an ONNX file is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Quantization:
    """How a tensor of a file is quantized.

    Attributes:
        scale: float32, one number or one for each index of ``axis``; with blocks one for each
            block, and as many dimensions as the tensor.
        zero_point: of the element type of the codes, the shape of ``scale``.
        axis: of the scales, or that the blocks lie along.
        bits: of the codes, 0 for those of the element type.
        block_size: elements of one block, 0 without blocks.
    """

    scale: Tensor
    zero_point: Tensor
    axis: int
    bits: int = 0
    block_size: int = 0

    def permuted(self, order: Sequence[int]) -> Quantization:
        """Return how the tensor is quantized after its dimensions were put into another order."""
        axis = list(order).index(self.axis % len(order))
        if not self.block_size:
            return replace(self, axis=axis)
        parts = [part.permute(*order) for part in (self.scale, self.zero_point)]
        return replace(self, scale=parts[0], zero_point=parts[1], axis=axis)

    def equals(self, other: Quantization) -> bool:
        """Return True if both give the same codes."""
        same = (
            self.zero_point.dtype == other.zero_point.dtype
            and (self.bits, self.block_size) == (other.bits, other.block_size)
            and self.scale.shape == other.scale.shape
        )
        same = same and (self.axis == other.axis or self.scale.numel() == 1)
        return (
            same
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )
