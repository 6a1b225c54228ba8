"""GhostNetV3 (github.com/huawei-noah/Efficient-AI-Backbones)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class GhostV3(nn.Module):
    def __init__(self, cin: int, mid: int) -> None:
        super().__init__()
        self.infer_mode = False
        self.primary_conv, self.cheap_operation = nn.Identity(), nn.Identity()
        self.primary_rpr_skip, self.primary_rpr_scale = None, None
        self.primary_rpr_conv = nn.ModuleList(conv_bn(cin, mid, 1) for _ in range(3))
        self.cheap_rpr_skip = nn.BatchNorm2d(mid)
        self.cheap_rpr_conv = nn.ModuleList(conv_bn(mid, mid, 3, 1, 1, mid) for _ in range(3))
        self.cheap_rpr_scale = conv_bn(mid, mid, 1, groups=mid)
        self.primary_activation, self.cheap_activation = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.infer_mode:
            one = self.primary_conv(x)
            return torch.cat([one, self.cheap_operation(one)], 1)
        one = self.primary_activation(sum(conv(x) for conv in self.primary_rpr_conv))
        two = (
            self.cheap_rpr_skip(one)
            + self.cheap_rpr_scale(one)
            + sum(conv(one) for conv in self.cheap_rpr_conv)
        )
        return torch.cat([one, self.cheap_activation(two)], 1)


class GhostV3Bottleneck(nn.Module):
    """Only its strided form sums branches of its own, between two modules that do too."""

    def __init__(self, cin: int, mid: int) -> None:
        super().__init__()
        self.infer_mode = False
        self.conv_dw, self.bn_dw = nn.Identity(), nn.Identity()
        self.ghost1, self.ghost2 = GhostV3(cin, mid), GhostV3(2 * mid, mid)
        self.dw_rpr_conv = nn.ModuleList(
            conv_bn(2 * mid, 2 * mid, 3, 2, 1, 2 * mid) for _ in range(3)
        )
        self.dw_rpr_scale, self.dw_rpr_skip = conv_bn(2 * mid, 2 * mid, 1, 2, groups=2 * mid), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.ghost1(x)
        if self.infer_mode:
            return self.ghost2(self.bn_dw(self.conv_dw(x)))
        out = self.dw_rpr_scale(x)
        for conv in self.dw_rpr_conv:
            out += conv(x)
        return self.ghost2(out)


CASES = {
    "ghostnetv3": Case(lambda: GhostV3(8, 6), 8, "ghostnetv3", "primary_conv"),
    "ghostnetv3-bottleneck": Case(
        lambda: GhostV3Bottleneck(8, 6), 8, "ghostnetv3-bottleneck", "conv_dw"
    ),
}
