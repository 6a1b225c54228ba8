"""Diverse Branch Block (github.com/DingXiaoH/DiverseBranchBlock)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class BNAndPad(nn.Module):
    """Pads with the BatchNorm's result for zero by item assignment, which torch.fx cannot trace."""

    def __init__(self, pad: int, c: int) -> None:
        super().__init__()
        self.bn, self.pad_pixels = nn.BatchNorm2d(c), pad

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(x)
        if self.pad_pixels:
            p = self.pad_pixels
            value = (
                self.bn.bias
                - self.bn.running_mean
                * self.bn.weight
                / torch.sqrt(self.bn.running_var + self.bn.eps)
            ).view(1, -1, 1, 1)
            out = F.pad(out, [p] * 4)
            out[:, :, :p], out[:, :, -p:], out[..., :p], out[..., -p:] = value, value, value, value
        return out


class IdConv1x1(nn.Module):
    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.conv, self.groups = nn.Conv2d(c, c, 1, groups=groups, bias=False), groups
        self.id_tensor = torch.zeros(c, c // groups, 1, 1)
        self.id_tensor[torch.arange(c), torch.arange(c) % (c // groups)] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight + self.id_tensor.to(x), groups=self.groups)


class DBB(nn.Module):
    def __init__(self, cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        p, self.nonlinear = k // 2, nn.ReLU()
        self.dbb_origin = conv_bn(cin, cout, k, stride, p, groups)
        if groups < cout:
            self.dbb_1x1 = conv_bn(cin, cout, 1, stride, 0, groups)
        self.dbb_avg = nn.Sequential()
        if groups < cout:
            self.dbb_avg.add_module("conv", nn.Conv2d(cin, cout, 1, groups=groups, bias=False))
            self.dbb_avg.add_module("bn", BNAndPad(p, cout))
        self.dbb_avg.add_module("avg", nn.AvgPool2d(k, stride, 0 if groups < cout else p))
        self.dbb_avg.add_module("avgbn", nn.BatchNorm2d(cout))
        self.dbb_1x1_kxk = nn.Sequential()
        same = cin == cout
        first = (
            IdConv1x1(cin, groups) if same else nn.Conv2d(cin, cin, 1, groups=groups, bias=False)
        )
        self.dbb_1x1_kxk.add_module("idconv1" if same else "conv1", first)
        self.dbb_1x1_kxk.add_module("bn1", BNAndPad(p, cin))
        self.dbb_1x1_kxk.add_module(
            "conv2", nn.Conv2d(cin, cout, k, stride, groups=groups, bias=False)
        )
        self.dbb_1x1_kxk.add_module("bn2", nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "dbb_reparam"):
            return self.nonlinear(self.dbb_reparam(x))
        out = self.dbb_origin(x)
        if hasattr(self, "dbb_1x1"):
            out = out + self.dbb_1x1(x)
        return self.nonlinear(out + self.dbb_avg(x) + self.dbb_1x1_kxk(x))


CASES = {
    "dbb": Case(lambda: DBB(8, 8), 8, "dbb", "dbb_reparam"),
    "dbb-groups": Case(lambda: DBB(8, 8, groups=4), 8, "dbb", "dbb_reparam"),
    "dbb-depthwise": Case(lambda: DBB(8, 8, groups=8), 8, "dbb", "dbb_reparam"),
    "dbb-stride": Case(lambda: DBB(8, 12, 5, stride=2, groups=2), 8, "dbb", "dbb_reparam"),
}
