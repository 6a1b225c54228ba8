"""YOLOv7: RepConv and heads with implicit knowledge (github.com/WongKinYiu/yolov7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case


class Yolov7RepConv(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.deploy, self.groups = False, groups
        self.act = nn.SiLU()
        self.rbr_identity = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_dense = nn.Sequential(
            nn.Conv2d(cin, cout, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(cout)
        )
        self.rbr_1x1 = nn.Sequential(
            nn.Conv2d(cin, cout, 1, stride, 0, groups=groups, bias=False), nn.BatchNorm2d(cout)
        )

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.act(self.rbr_reparam(x))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.act(self.rbr_dense(x) + self.rbr_1x1(x) + out)


class ImplicitA(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.implicit = nn.Parameter(torch.randn(1, c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.implicit + x


class ImplicitM(ImplicitA):
    def forward(self, x: Tensor) -> Tensor:
        return self.implicit * x


class ImplicitHead(nn.Module):
    def __init__(self, channels: tuple[int, ...], out: int, bias: bool = True) -> None:
        super().__init__()
        self.m = nn.ModuleList(nn.Conv2d(c, out, 1, bias=bias) for c in channels)
        self.ia = nn.ModuleList(ImplicitA(c) for c in channels)
        self.im = nn.ModuleList(ImplicitM(out) for _ in channels)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [im(m(ia(x))) for m, ia, im, x in zip(self.m, self.ia, self.im, xs, strict=True)]


CASES = {
    "yolov7": Case(lambda: Yolov7RepConv(8, 8), 8, "repvgg", "rbr_reparam"),
    "yolov7-groups": Case(lambda: Yolov7RepConv(8, 8, groups=2), 8, "repvgg", "rbr_reparam"),
    "yolov7-depthwise": Case(lambda: Yolov7RepConv(8, 8, groups=8), 8, "repvgg", "rbr_reparam"),
}
