"""YOLOv10: RepVGGDW (github.com/THU-MIG/yolov10, github.com/ultralytics/ultralytics)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.ultralytics import UltraConv


class RepVGGDW(nn.Module):
    """A 7x7 and a 3x3 depthwise convolution, each with BatchNorm, then an activation."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = UltraConv(c, c, 7, 3, groups=c)
        self.conv1 = UltraConv(c, c, 3, 1, groups=c)
        self.dim, self.act = c, nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x) + self.conv1(x))

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


CASES = {
    "ultralytics-repvggdw": Case(lambda: RepVGGDW(8), 8, "ultralytics-repvggdw", "conv"),
}
