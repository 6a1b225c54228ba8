"""VanillaNet (github.com/huawei-noah/VanillaNet)."""

from __future__ import annotations

from itertools import pairwise

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


class VanillaNet(nn.Module):
    def __init__(self, dims: tuple[int, ...] = (8, 12), classes: int = 5) -> None:
        super().__init__()
        first, last = dims[0], dims[-1]
        self.act_learn, self.deploy = 1.0, False
        self.stem1 = nn.Sequential(nn.Conv2d(3, first, 4, stride=4), nn.BatchNorm2d(first))
        self.stem2 = nn.Sequential(
            nn.Conv2d(first, first, 1), nn.BatchNorm2d(first), VanillaActivation(first)
        )
        self.stages = nn.ModuleList(VanillaBlock(*pair) for pair in pairwise(dims))
        self.cls1 = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Dropout(0.1),
            nn.Conv2d(last, classes, 1),
            nn.BatchNorm2d(classes),
        )
        self.cls2 = nn.Sequential(nn.Conv2d(classes, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            x = self.stem(x)
        else:
            x = self.stem2(F.leaky_relu(self.stem1(x), self.act_learn))
        for stage in self.stages:
            x = stage(x)
        if self.deploy:
            x = self.cls(x)
        else:
            x = self.cls2(F.leaky_relu(self.cls1(x), self.act_learn))
        return x.flatten(1)


CASES = {
    "vanillanet-activation": Case(
        lambda: VanillaActivation(8), 8, "vanillanet-activation", "weight"
    ),
    "vanillanet": Case(lambda: VanillaBlock(8, 12), 8, "vanillanet-block", "conv"),
    "vanillanet-whole": Case(VanillaNet, 3, "vanillanet", "stem"),
}
