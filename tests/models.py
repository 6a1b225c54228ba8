"""Toy networks that several tests share.

A test that needs one special trait keeps its own small network beside it, where a reader sees the
trait. What more than one test needs is here. Images have three channels unless a class says
otherwise.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["RepVGGBlock", "StagedNet"]


class StagedNet(nn.Module):
    """A residual network with named stages: ``stem``, ``layer4.downsample``, ``head``.

    Input (N, 3, H, W) with H and W at least 4, output (N, 2).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.layer4 = nn.Module()
        self.layer4.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.layer4.downsample = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (self.layer4.conv(x) + self.layer4.downsample(x)).relu()
        return self.head(x.mean((2, 3)))


class RepVGGBlock(nn.Module):
    """The block of RepVGG: a 3x3 and a 1x1 convolution and the identity, each with BatchNorm.

    Input (N, in_channels, H, W), output (N, out_channels, H, W).
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.nonlinearity = nn.ReLU()
        self.rbr_dense = nn.Sequential()
        self.rbr_dense.add_module(
            "conv", nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        )
        self.rbr_dense.add_module("bn", nn.BatchNorm2d(out_channels))
        self.rbr_1x1 = nn.Sequential()
        self.rbr_1x1.add_module("conv", nn.Conv2d(in_channels, out_channels, 1, bias=False))
        self.rbr_1x1.add_module("bn", nn.BatchNorm2d(out_channels))
        self.rbr_identity = nn.BatchNorm2d(in_channels) if in_channels == out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.rbr_reparam(x))
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.nonlinearity(self.rbr_dense(x) + self.rbr_1x1(x) + identity)
