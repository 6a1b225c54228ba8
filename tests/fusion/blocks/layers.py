"""Layers that blocks of several families are built of, and what a test of a family expects."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A block in its training form, for images, and what the report names.

    Attributes:
        attribute: holds the merged layer; None where the layer replaces the block.
    """

    make: Callable[[], nn.Module]
    family: str
    attribute: str | None
    in_channels: int = 8


def conv_bn(
    cin: int,
    cout: int,
    k: int,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    bias: bool = False,
    conv: str = "conv",
    bn: str = "bn",
) -> nn.Sequential:
    layer = nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=bias)
    return nn.Sequential(OrderedDict({conv: layer, bn: nn.BatchNorm2d(cout)}))


class SE(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(c, 4, 1)
        self.up = nn.Conv2d(4, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(
            self.up(F.relu(self.down(x.mean((2, 3), keepdim=True))))
        )


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if not self.training else x * torch.bernoulli(torch.tensor(0.5))


class BatchNormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a BatchNorm with drop and activation inside."""

    def __init__(self, c: int, act: bool = True) -> None:
        super().__init__(c)
        self.drop = nn.Identity()
        self.act = nn.ReLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected 4 dimensions")
        statistics = (self.running_mean, self.running_var)
        x = F.batch_norm(x, *statistics, self.weight, self.bias, eps=self.eps)
        return self.act(self.drop(x))


class ConvNormAct(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int,
        stride: int = 1,
        groups: int = 1,
        act: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False)
        self.bn = BatchNormAct(cout, act)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class LayerScale(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma
