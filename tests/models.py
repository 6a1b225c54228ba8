"""Toy networks that several tests share.

A test that needs one special trait keeps its own small network beside it, where a reader sees the
trait. What more than one test needs is here. Images have three channels unless a class says
otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchq

__all__ = [
    "Conv1D",
    "ConvBNReLU",
    "ConvNet",
    "Parts",
    "Projection",
    "SamePadConv2d",
    "StagedNet",
    "SumNet",
    "TwoReaders",
    "image_batches",
    "simulated",
]


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
        self.layer4.downsample = nn.Sequential(
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Sequential(nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (self.layer4.conv(x) + self.layer4.downsample(x)).relu()
        return self.head(x.mean((2, 3)))


class Parts(nn.Module):
    """Base of networks that are given their children, parameters and settings by name."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class ConvBNReLU(nn.Sequential):
    """A 3x3 convolution with BatchNorm and ReLU. Input (N, in_channels, H, W)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
            nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.03),
            nn.ReLU(),
        )


class ConvNet(nn.Module):
    """Three blocks, a residual addition, and a linear head. Input (N, 3, H, W), output (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBNReLU(3, 8)
        self.left = ConvBNReLU(8, 8)
        self.right = ConvBNReLU(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.right(self.left(x))).mean((2, 3)))


class SumNet(nn.Module):
    """Two layers, a sum and a head, so that codes of both signs are there.

    Input (N, 3, H, W), output (N, 5).
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + self.second(x)
        return self.head(x.mean((2, 3)))


class TwoReaders(nn.Module):
    """Two layers that read one tensor, and are added. Input (N, 3, H, W), output (N, 4, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 1)
        self.b = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class SamePadConv2d(nn.Conv2d):
    """A convolution with a forward of its own, as in timm and EfficientNet ports."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, [1, 1, 1, 1]))


def image_batches(count: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return images (4, 3, 8, 8), the same in every call."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(4, 3, 8, 8, generator=generator).to(dtype) for _ in range(count)
    ]


def simulated(
    model: nn.Module,
    batches: Any,
    config: Any = None,
    *,
    correct: bool = True,
    **options: Any,
) -> Any:
    """Quantize a model in place, calibrate it on batches, and return it."""
    ranges = {
        name: options.pop(name) for name in ("method", "on_unseen") if name in options
    }
    torchq.quantize_(model, config, **options)
    torchq.calibrate(model, batches, correct=correct, progress=False, **ranges)
    return model


class Conv1D(nn.Module):
    """As Hugging Face's Conv1D: a linear layer with the transposed weight (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Projection(nn.Module):
    """A product with a parameter of its own, by an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel
