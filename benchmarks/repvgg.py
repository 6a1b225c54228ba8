"""RepVGG (Ding et al., 2101.03697) with the attribute names of its authors.

A large one with random weights for latency, and a small one that was trained on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RepVGG", "RepVGGBlock", "repvgg_a0", "repvgg_cifar"]


class RepVGGBlock(nn.Module):
    """3x3, 1x1 and identity branches, each with a BatchNorm, then a ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.rbr_identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        self.rbr_dense = _conv_bn(inputs, outputs, 3, stride)
        self.rbr_1x1 = _conv_bn(inputs, outputs, 1, stride)
        self.nonlinearity = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, inputs, H, W)`` to ``(N, outputs, H / stride, W / stride)``."""
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.rbr_reparam(x))
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.nonlinearity(self.rbr_dense(x) + self.rbr_1x1(x) + identity)


def _conv_bn(inputs: int, outputs: int, size: int, stride: int) -> nn.Module:
    block = nn.Sequential()
    block.add_module("conv", nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False))
    block.add_module("bn", nn.BatchNorm2d(outputs))
    return block


class RepVGG(nn.Module):
    """Blocks, global average pool, one linear layer.

    Args:
        widths: the output channels of each block.
        strides: the stride of each block.
        classes: the outputs of the linear layer.
    """

    def __init__(self, widths: Sequence[int], strides: Sequence[int], classes: int) -> None:
        super().__init__()
        inputs = (3, *widths)
        self.stages = nn.Sequential(
            *(RepVGGBlock(i, o, s) for i, o, s in zip(inputs, widths, strides, strict=False))
        )
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, 3, H, W)`` to ``(N, classes)``."""
        return self.linear(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))


def repvgg_a0() -> RepVGG:
    """Return RepVGG-A0 with random weights."""
    widths = [48, *[48] * 2, *[96] * 4, *[192] * 14, 1280]
    strides = [2, 2, 1, 2, *[1] * 3, 2, *[1] * 13, 2]
    return RepVGG(widths, strides, 1000)


def repvgg_cifar(folder: Path) -> RepVGG:
    """Return the trained small network in eval mode: 12 blocks of 32, 64 and 128 channels.

    Args:
        folder: holds ``repvgg.pt``.
    """
    model = RepVGG([32] * 4 + [64] * 4 + [128] * 4, [*[1] * 4, 2, *[1] * 3, 2, *[1] * 3], 10)
    model.load_state_dict(torch.load(folder / "repvgg.pt", map_location="cpu", weights_only=True))
    return model.eval()
