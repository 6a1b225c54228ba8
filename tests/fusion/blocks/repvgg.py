"""RepVGG, RepVGGplus (github.com/DingXiaoH/RepVGG)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import SE, conv_bn


class RepVGGBlock(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        stride: int = 1,
        groups: int = 1,
        se: bool = False,
        post_se: bool = False,
    ) -> None:
        super().__init__()
        self.deploy, self.groups, self.in_channels = False, groups, cin
        self.nonlinearity = nn.ReLU()
        self.se = SE(cout) if se else nn.Identity()
        self.post_se = SE(cout) if post_se else nn.Identity()
        self.rbr_identity = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_dense = conv_bn(cin, cout, 3, stride, 1, groups)
        self.rbr_1x1 = conv_bn(cin, cout, 1, stride, 0, groups)
        self.id_tensor = torch.ones(1)  # upstream caches a plain tensor here

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.post_se(self.nonlinearity(self.se(self.rbr_reparam(x))))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.post_se(self.nonlinearity(self.se(self.rbr_dense(x) + self.rbr_1x1(x) + out)))


class CustomL2Block(RepVGGBlock):
    def forward(self, x: Tensor, penalty: float) -> tuple[Tensor, float]:
        return super().forward(x), penalty


CASES = {
    "repvgg": Case(lambda: RepVGGBlock(8, 8), 8, "repvgg", "rbr_reparam"),
    "repvgg-stride": Case(lambda: RepVGGBlock(8, 12, stride=2), 8, "repvgg", "rbr_reparam"),
    "repvgg-groups": Case(lambda: RepVGGBlock(8, 8, groups=4), 8, "repvgg", "rbr_reparam"),
    "repvgg-depthwise": Case(lambda: RepVGGBlock(8, 8, groups=8), 8, "repvgg", "rbr_reparam"),
    "repvgg-se": Case(lambda: RepVGGBlock(8, 8, se=True), 8, "repvgg", "rbr_reparam"),
    "repvggplus": Case(lambda: RepVGGBlock(8, 8, post_se=True), 8, "repvgg", "rbr_reparam"),
}
