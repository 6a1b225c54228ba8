"""VanillaNet (github.com/huawei-noah/VanillaNet)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.blocks.case import Case


class VanillaActivation(nn.ReLU):
    def __init__(self, dim: int, act_num: int = 3) -> None:
        super().__init__()
        self.deploy, self.dim, self.act_num = False, dim, act_num
        self.weight = nn.Parameter(torch.randn(dim, 1, 2 * act_num + 1, 2 * act_num + 1))
        self.bias, self.bn = None, nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        out = F.conv2d(
            super().forward(x), self.weight, self.bias, padding=self.act_num, groups=self.dim
        )
        return out if self.deploy else self.bn(out)


class VanillaBlock(nn.Module):
    def __init__(self, cin: int, cout: int, act_learn: int = 1) -> None:
        super().__init__()
        self.act_learn, self.deploy = act_learn, False
        self.conv1 = nn.Sequential(nn.Conv2d(cin, cin, 1), nn.BatchNorm2d(cin))
        self.conv2 = nn.Sequential(nn.Conv2d(cin, cout, 1), nn.BatchNorm2d(cout))
        self.pool, self.act = nn.MaxPool2d(2), VanillaActivation(cout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if self.deploy else self.conv2(F.leaky_relu(self.conv1(x), self.act_learn))
        return self.act(self.pool(x))


CASES = {
    "vanillanet-activation": Case(
        lambda: VanillaActivation(8), 8, "vanillanet-activation", "weight"
    ),
    "vanillanet": Case(lambda: VanillaBlock(8, 12), 8, "vanillanet-block", "conv"),
}
