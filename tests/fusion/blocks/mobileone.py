"""MobileOne and FastViT (github.com/apple/ml-mobileone, github.com/apple/ml-fastvit)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import SE, conv_bn


class MobileOne(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int = 3,
        stride: int = 1,
        groups: int = 1,
        branches: int = 2,
        scale: bool = True,
    ) -> None:
        super().__init__()
        self.inference_mode = False
        self.se, self.activation = SE(cout), nn.GELU()
        self.rbr_skip = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_conv = nn.ModuleList(
            conv_bn(cin, cout, k, stride, k // 2, groups) for _ in range(branches)
        )
        self.rbr_scale = conv_bn(cin, cout, 1, stride, 0, groups) if scale and k > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.inference_mode:
            return self.activation(self.se(self.reparam_conv(x)))
        out = 0 if self.rbr_skip is None else self.rbr_skip(x)
        out = out + (0 if self.rbr_scale is None else self.rbr_scale(x))
        for conv in self.rbr_conv:
            out = out + conv(x)
        return self.activation(self.se(out))


class RepCPE(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.pe = nn.Conv2d(c, c, 7, 1, 3, groups=c)

    def forward(self, x: Tensor) -> Tensor:
        return self.reparam_conv(x) if hasattr(self, "reparam_conv") else self.pe(x) + x


CASES = {
    "mobileone": Case(lambda: MobileOne(8, 8, branches=3), 8, "mobileone", "reparam_conv"),
    "mobileone-depthwise": Case(
        lambda: MobileOne(8, 8, stride=2, groups=8), 8, "mobileone", "reparam_conv"
    ),
    "mobileone-pointwise": Case(lambda: MobileOne(8, 12, k=1), 8, "mobileone", "reparam_conv"),
    "fastvit-mobileone-skip": Case(
        lambda: MobileOne(8, 8, branches=0, scale=False), 8, "mobileone", "reparam_conv"
    ),
    "repcpe": Case(lambda: RepCPE(8), 8, "repcpe", "reparam_conv"),
}
