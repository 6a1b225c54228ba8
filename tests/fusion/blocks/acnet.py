"""ACNet (github.com/DingXiaoH/ACNet)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case


class ACBlock(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int = 3,
        padding: int = 1,
        stride: int = 1,
        groups: int = 1,
        affine: bool = True,
    ) -> None:
        super().__init__()
        self.deploy, self.crop = False, max(0, k // 2 - padding)
        pad = max(0, padding - k // 2)
        self.square_conv = nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=False)
        self.square_bn = nn.BatchNorm2d(cout, affine=affine)
        self.ver_conv = nn.Conv2d(
            cin, cout, (k, 1), stride, (padding, pad), groups=groups, bias=False
        )
        self.hor_conv = nn.Conv2d(
            cin, cout, (1, k), stride, (pad, padding), groups=groups, bias=False
        )
        self.ver_bn, self.hor_bn = (
            nn.BatchNorm2d(cout, affine=affine),
            nn.BatchNorm2d(cout, affine=affine),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.fused_conv(x)
        ver = x if self.crop == 0 else x[:, :, :, self.crop : -self.crop]
        hor = x if self.crop == 0 else x[:, :, self.crop : -self.crop, :]
        return (
            self.square_bn(self.square_conv(x))
            + self.ver_bn(self.ver_conv(ver))
            + self.hor_bn(self.hor_conv(hor))
        )


CASES = {
    "acnet": Case(lambda: ACBlock(8, 12), 8, "acnet", "fused_conv"),
    "acnet-crop": Case(lambda: ACBlock(8, 8, k=5, padding=0, groups=2), 8, "acnet", "fused_conv"),
    "acnet-wide": Case(
        lambda: ACBlock(8, 8, padding=3, stride=2, affine=False), 8, "acnet", "fused_conv"
    ),
}
