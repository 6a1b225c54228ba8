"""The small models of the scenarios."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ConvNet", "batches"]


class Block(nn.Sequential):
    """Conv, BatchNorm, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03),
            nn.ReLU(),
        )


class ConvNet(nn.Module):
    """Three blocks, a residual sum, and a linear head. Input (N, 3, H, W), output (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Block(3, 8)
        self.left, self.right = Block(8, 8), Block(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.right(self.left(x))).mean((2, 3)))


def batches(count: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Images of (4, 3, 8, 8), the same each time."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 3, 8, 8, generator=generator).to(dtype) for _ in range(count)]
