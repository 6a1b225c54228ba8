"""YOLOv6: QARepVGG and CSLA blocks (github.com/meituan/YOLOv6)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class QARepVGG(nn.Module):
    """Plain 1x1, identity and (v2) average pool branches, and one BatchNorm behind the addition."""

    def __init__(
        self, cin: int, cout: int, stride: int = 1, groups: int = 1, avg: bool = False
    ) -> None:
        super().__init__()
        self.nonlinearity, self.se = nn.ReLU(), nn.Identity()
        self.rbr_dense = conv_bn(cin, cout, 3, stride, 1, groups)
        self.rbr_1x1 = nn.Conv2d(cin, cout, 1, stride, groups=groups, bias=False)
        same = cin == cout and stride == 1
        self.rbr_identity = nn.Identity() if same else None
        self.rbr_avg = nn.AvgPool2d(3, stride, 1) if avg and same else None
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.bn(self.se(self.rbr_reparam(x))))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        avg = 0 if self.rbr_avg is None else self.rbr_avg(x)
        return self.nonlinearity(self.bn(self.se(self.rbr_dense(x) + self.rbr_1x1(x) + out + avg)))


class ScaleLayer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(1, -1, 1, 1)


class LinearAddBlock(nn.Module):
    """YOLOv6 CSLA: no BatchNorm in the branches, and no deployed form upstream."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.scale_conv = nn.Conv2d(c, c, 3, 1, 1, bias=False), ScaleLayer(c)
        self.conv_1x1, self.scale_1x1 = nn.Conv2d(c, c, 1, bias=False), ScaleLayer(c)
        self.scale_identity, self.bn, self.nonlinearity = (
            ScaleLayer(c),
            nn.BatchNorm2d(c),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlinearity(
            self.bn(
                self.scale_conv(self.conv(x))
                + self.scale_1x1(self.conv_1x1(x))
                + self.scale_identity(x)
            )
        )


CASES = {
    "qarepvgg": Case(lambda: QARepVGG(8, 8), 8, "qarepvgg", "rbr_reparam"),
    "qarepvgg-stride": Case(lambda: QARepVGG(8, 16, stride=2), 8, "qarepvgg", "rbr_reparam"),
    "qarepvgg-v2": Case(lambda: QARepVGG(8, 8, groups=2, avg=True), 8, "qarepvgg", "rbr_reparam"),
    "csla": Case(lambda: LinearAddBlock(8), 8, "yolov6-linear-add", None),
}
