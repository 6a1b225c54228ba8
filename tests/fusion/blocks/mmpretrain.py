"""RepVGG and MobileOne of mmpretrain (github.com/open-mmlab/mmpretrain)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import SE, conv_bn


class MMPretrainBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.deploy = False
        self.branch_3x3 = conv_bn(cin, cout, 3, stride, 1, groups, bn="norm")
        self.branch_1x1 = conv_bn(cin, cout, 1, stride, 0, groups, bn="norm")
        self.branch_norm = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.se_layer, self.act = SE(cout), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.act(self.se_layer(self.branch_reparam(x)))
        out = self.branch_3x3(x) + self.branch_1x1(x)
        out = out if self.branch_norm is None else out + self.branch_norm(x)
        return self.act(self.se_layer(out))


class MMMobileOne(nn.Module):
    def __init__(self, cin: int, cout: int, groups: int = 1) -> None:
        super().__init__()
        self.deploy = False
        self.branch_conv_list = nn.ModuleList(
            conv_bn(cin, cout, 3, 1, 1, groups, bn="norm") for _ in range(3)
        )
        self.branch_scale, self.branch_norm = (
            conv_bn(cin, cout, 1, groups=groups, bn="norm"),
            nn.BatchNorm2d(cin),
        )
        self.se_layer, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.act(self.se_layer(self.branch_reparam(x)))
        out = sum(branch(x) for branch in self.branch_conv_list)
        out = out + self.branch_scale(x) + self.branch_norm(x)
        return self.act(self.se_layer(out))


CASES = {
    "mmpretrain": Case(
        lambda: MMPretrainBlock(8, 8, groups=2), 8, "mmpretrain-repvgg", "branch_reparam"
    ),
    "mmpretrain-stride": Case(
        lambda: MMPretrainBlock(8, 12, 2), 8, "mmpretrain-repvgg", "branch_reparam"
    ),
    "mmpretrain-mobileone": Case(
        lambda: MMMobileOne(8, 8, 8), 8, "mmpretrain-mobileone", "branch_reparam"
    ),
}
