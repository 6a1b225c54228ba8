"""A small ShuffleNet V2 (Ma et al., 1807.11164) for images of 32 by 32, which is trained here.

It has what quantizing finds hard in networks for telephones: depthwise convolutions, halves of the
channels that pass a unit unchanged, and concatenated channels that a shuffle mixes.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cifar import read_split
from benchmarks.qat_networks import image_loss, kept
from benchmarks.qat_training import Training, fit

__all__ = ["ShuffleNet", "shufflenet_cifar"]

_TRAINING = Training(2000, 0.1, weight_decay=5e-4)


def _pointwise(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a 1x1 convolution with BatchNorm and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, 1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def _depthwise(channels: int, stride: int) -> list[nn.Module]:
    """Return a depthwise 3x3 convolution with BatchNorm."""
    convolution = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


def _shuffled(x: Tensor) -> Tensor:
    """Return the channels of the first and of the second half in turn."""
    count, channels, height, width = x.shape
    halves = x.view(count, 2, channels // 2, height, width)
    return halves.transpose(1, 2).reshape(count, channels, height, width)


class _Unit(nn.Module):
    """One unit of figure 3: (c) keeps the size, (d) halves it and changes the channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        first = half if stride == 1 else inputs
        self.shortcut = None
        if stride == 2:
            self.shortcut = nn.Sequential(*_depthwise(inputs, 2), *_pointwise(inputs, half))
        self.branch = nn.Sequential(
            *_pointwise(first, half), *_depthwise(half, stride), *_pointwise(half, half)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, inputs, H, W)`` to ``(N, outputs, H / stride, W / stride)``."""
        if self.shortcut is None:
            kept_half, x = x.chunk(2, dim=1)
        else:
            kept_half = self.shortcut(x)
        return _shuffled(torch.cat((kept_half, self.branch(x)), dim=1))


class ShuffleNet(nn.Module):
    """A 3x3 convolution, two stages of units, a 1x1 convolution, average pool, one linear layer."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        widths = (32, 64, 64, 64, 64, 128, 128, 128, 128)
        units = (_Unit(i, o, 1 if i == o else 2) for i, o in pairwise(widths))
        self.features = nn.Sequential(stem, *units, *_pointwise(128, 256))
        self.linear = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, 3, H, W)`` to ``(N, classes)``."""
        return self.linear(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def shufflenet_cifar(folder: Path) -> nn.Module:
    """Return the network in eval mode, trained on all training images, for some minutes.

    It is trained from seed 0 once, and goes on where it was stopped.

    Args:
        folder: holds the images; ``shufflenet.pt`` is read from it or written there.
    """

    def train() -> nn.Module:
        data = read_split(folder, "train", 50_000)
        torch.manual_seed(0)
        model = ShuffleNet().to(memory_format=torch.channels_last)
        loss, state = image_loss(model, data), folder / "shufflenet.state"
        return fit(model, loss, _TRAINING, label="float ShuffleNet", checkpoint=state)

    return kept(folder / "shufflenet.pt", ShuffleNet(), train)
