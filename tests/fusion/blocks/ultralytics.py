"""Ultralytics (github.com/ultralytics/ultralytics)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case


class UltraConv(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int,
        padding: int,
        stride: int = 1,
        groups: int = 1,
        act: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(cout)
        self.act = nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class UltraRepConv(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.conv1 = UltraConv(cin, cout, 3, 1, stride, groups)
        self.conv2 = UltraConv(cin, cout, 1, 0, stride, groups)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv1(x) + self.conv2(x) + (0 if self.bn is None else self.bn(x)))

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class UltraConv2(UltraConv):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__(cin, cout, 3, 1, act=True)
        self.cv2 = nn.Conv2d(cin, cout, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x) + self.cv2(x)))

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


CASES = {
    "ultralytics-repconv": Case(lambda: UltraRepConv(8, 8), 8, "ultralytics-repconv", "conv"),
    "ultralytics-repconv-stride": Case(
        lambda: UltraRepConv(8, 8, 2, 2), 8, "ultralytics-repconv", "conv"
    ),
    "ultralytics-conv2": Case(lambda: UltraConv2(8, 12), 8, "ultralytics-conv2", "conv"),
}
