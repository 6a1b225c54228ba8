"""RepViT (github.com/THU-MIG/RepViT)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class RepVGGDW(nn.Module):
    """RepViT: its fuse() returns a convolution that takes the block's place."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.conv1 = conv_bn(c, c, 3, 1, 1, c, conv="c"), nn.Conv2d(c, c, 1, groups=c)
        self.bn = nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn((self.conv(x) + self.conv1(x)) + x)


class Residual(nn.Module):
    def __init__(self, m: nn.Module, drop: float = 0.0) -> None:
        super().__init__()
        self.m, self.drop = m, drop

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop > 0:
            return x + self.m(x) * torch.rand(x.size(0), 1, 1, 1)
        return x + self.m(x)


class BNLinear(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.add_module("bn", nn.BatchNorm1d(a))
        self.add_module("l", nn.Linear(a, b))


class Classifier(nn.Module):
    """Two heads, one of them trained on a teacher; their results are averaged."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.classifier, self.classifier_dist = BNLinear(dim, classes), BNLinear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return (self.classifier(x) + self.classifier_dist(x)) / 2


CASES = {
    "repvit-dw": Case(lambda: RepVGGDW(8), 8, "repvit-depthwise", None),
    "repvit-residual": Case(
        lambda: Residual(conv_bn(8, 8, 3, 1, 1, 8)), 8, "repvit-residual", None
    ),
    "repvit-nested": Case(lambda: Residual(RepVGGDW(8)), 8, "repvit-residual", None),
}
