"""PP-YOLOE and RT-DETR (github.com/PaddlePaddle/PaddleDetection, github.com/lyuwenyu/RT-DETR)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class PPYoloeBlock(nn.Module):
    def __init__(self, cin: int, cout: int, alpha: float | None = None, norm: str = "bn") -> None:
        super().__init__()
        self.conv1 = conv_bn(cin, cout, 3, 1, 1, bn=norm)
        self.conv2 = conv_bn(cin, cout, 1, 1, 0, bn=norm)
        self.act = nn.SiLU()
        self.alpha = None if alpha is None else nn.Parameter(torch.tensor([float(alpha)]))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "conv"):
            return self.act(self.conv(x))
        if self.alpha is not None:
            return self.act(self.conv1(x) + self.alpha * self.conv2(x))
        return self.act(self.conv1(x) + self.conv2(x))


class TruthyAlphaBlock(PPYoloeBlock):
    """The upstream spelling, under which alpha == 0 means a coefficient of one."""

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "conv"):
            return self.act(self.conv(x))
        if self.alpha:
            return self.act(self.conv1(x) + self.alpha * self.conv2(x))
        return self.act(self.conv1(x) + self.conv2(x))


CASES = {
    "ppyoloe": Case(lambda: PPYoloeBlock(8, 12), 8, "ppyoloe", "conv"),
    "ppyoloe-alpha": Case(lambda: PPYoloeBlock(8, 8, alpha=-0.3), 8, "ppyoloe", "conv"),
    "ppyoloe-alpha-zero": Case(lambda: PPYoloeBlock(8, 8, alpha=0), 8, "ppyoloe", "conv"),
    "ppyoloe-truthy-alpha-zero": Case(
        lambda: TruthyAlphaBlock(8, 8, alpha=0), 8, "ppyoloe", "conv"
    ),
    "rtdetr": Case(lambda: PPYoloeBlock(8, 8, norm="norm"), 8, "ppyoloe", "conv"),
}
