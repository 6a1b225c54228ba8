"""RepGhost (github.com/ChengpengChen/RepGhost)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case


class RepGhost(nn.Module):
    def __init__(self, cin: int, mid: int) -> None:
        super().__init__()
        self.primary_conv = nn.Sequential(
            nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU()
        )
        self.fusion_conv, self.fusion_bn = (
            nn.ModuleList([nn.Identity()]),
            nn.ModuleList([nn.BatchNorm2d(mid)]),
        )
        self.cheap_operation = nn.Sequential(
            nn.Conv2d(mid, mid, 3, 1, 1, groups=mid, bias=False), nn.BatchNorm2d(mid)
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        one = self.primary_conv(x)
        two = self.cheap_operation(one)
        for conv, bn in zip(self.fusion_conv, self.fusion_bn, strict=True):
            two = two + bn(conv(one))
        return self.relu(two)


CASES = {
    "repghost": Case(lambda: RepGhost(8, 6), 8, "repghost", "cheap_operation"),
}
