"""CIFAR-10 as JPEG files in a tar, and the networks that are trained on it.

The folder given as ``--data`` holds ``cifar10-jpeg-{train,test}.tar`` (members named
``SPLIT/CLASS/NNNN.jpg``) and the state dicts ``resnet20.pt`` and ``repvgg.pt``.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
_STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


@dataclass(frozen=True)
class Images:
    """Normalised images (N, 3, 32, 32) float32 and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int) -> list[Tensor]:
        """Return the images in order, ``size`` at a time."""
        return list(self.images.split(size))

    def augmented(
        self, index: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return a training batch: padded by 4, with one random crop, each image flipped or not."""
        images = F.pad(self.images[index], (4, 4, 4, 4))
        top, column = (
            int(torch.randint(0, 9, (), generator=generator)) for _ in range(2)
        )
        images = images[..., top : top + 32, column : column + 32]
        flip = torch.rand(len(index), generator=generator) < 0.5
        return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images), self.labels[
            index
        ]


def read_split(folder: Path, split: str, count: int) -> Images:
    """Return ``count`` images spread evenly over the tar's order, that is, over the classes."""
    from torchvision.io import ImageReadMode, decode_image

    with tarfile.open(folder / f"cifar10-jpeg-{split}.tar") as tar:
        members = [m for m in tar.getmembers() if m.name.endswith(".jpg")]
        members.sort(key=lambda m: m.name)
        classes = sorted({m.name.split("/")[-2] for m in members})
        chosen = [members[i * len(members) // count] for i in range(count)]
        chosen.sort(key=lambda m: m.offset)
        images, labels = [], []
        for member in chosen:
            stream = tar.extractfile(member)
            assert stream is not None
            data = torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8)
            images.append(
                (decode_image(data, ImageReadMode.RGB).float() / 255 - _MEAN) / _STD
            )
            labels.append(classes.index(member.name.split("/")[-2]))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return Images(torch.stack(images)[order], torch.tensor(labels)[order])


def some_batches(images: Tensor, count: int, seed: int, size: int = 64) -> list[Tensor]:
    """Return images that a seed chooses, without labels, in batches of ``size``."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return list(images[order[:count]].split(size))


@torch.no_grad()
def logits(model: nn.Module, data: Images, size: int = 250) -> Tensor:
    """Return the outputs of the model, (N, 10)."""
    return torch.cat([model(batch) for batch in data.batches(size)])


def accuracy(predicted: Tensor, data: Images) -> float:
    """Return the share of images, 0 to 1, whose largest logit is that of their label."""
    return (predicted.argmax(1) == data.labels).float().mean().item()


class _Block(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.extra = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride],
                (0, 0, 0, 0, self.extra, self.extra),
            )
        return F.relu(y + x)


class _ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in (1, 2, 3):
            first = _Block(widths[stage - 1], widths[stage], 1 if stage == 1 else 2)
            setattr(
                self,
                f"layer{stage}",
                nn.Sequential(
                    first, *(_Block(widths[stage], widths[stage], 1) for _ in range(2))
                ),
            )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20(folder: Path | None = None) -> nn.Module:
    """Return the CIFAR ResNet-20 (He et al. 2015, section 4.2) in eval mode.

    It is trained if ``folder`` is given, which holds ``resnet20.pt``.
    """
    model = _ResNet20()
    if folder is not None:
        model.load_state_dict(
            torch.load(folder / "resnet20.pt", map_location="cpu", weights_only=True)
        )
    return model.eval()


class RepVGGBlock(nn.Module):
    """3x3, 1x1 and identity branches, each with a BatchNorm, then a ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.rbr_identity = (
            nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        )
        self.rbr_dense = _conv_bn(inputs, outputs, 3, stride)
        self.rbr_1x1 = _conv_bn(inputs, outputs, 1, stride)
        self.nonlinearity = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, inputs, H, W)`` to ``(N, outputs, H / stride, W / stride)``."""
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.rbr_reparam(x))
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.nonlinearity(self.rbr_dense(x) + self.rbr_1x1(x) + identity)


def _conv_bn(inputs: int, outputs: int, size: int, stride: int) -> nn.Module:
    block = nn.Sequential()
    block.add_module(
        "conv", nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    )
    block.add_module("bn", nn.BatchNorm2d(outputs))
    return block


class RepVGG(nn.Module):
    """RepVGG (Ding et al., 2101.03697) with the attribute names of its authors.

    Args:
        widths: the output channels of each block.
        strides: the stride of each block.
        classes: the outputs of the linear layer.
    """

    def __init__(
        self, widths: Sequence[int], strides: Sequence[int], classes: int
    ) -> None:
        super().__init__()
        inputs = (3, *widths)
        self.stages = nn.Sequential(
            *(
                RepVGGBlock(i, o, s)
                for i, o, s in zip(inputs, widths, strides, strict=False)
            )
        )
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(N, 3, H, W)`` to ``(N, classes)``."""
        return self.linear(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))


def repvgg_a0() -> RepVGG:
    """Return RepVGG-A0 with random weights."""
    widths = [48, *[48] * 2, *[96] * 4, *[192] * 14, 1280]
    strides = [2, 2, 1, 2, *[1] * 3, 2, *[1] * 13, 2]
    return RepVGG(widths, strides, 1000)


def repvgg_cifar(folder: Path) -> RepVGG:
    """Return the trained small network in eval mode: 12 blocks of 32, 64 and 128 channels.

    Args:
        folder: holds ``repvgg.pt``.
    """
    model = RepVGG(
        [32] * 4 + [64] * 4 + [128] * 4, [*[1] * 4, 2, *[1] * 3, 2, *[1] * 3], 10
    )
    model.load_state_dict(
        torch.load(folder / "repvgg.pt", map_location="cpu", weights_only=True)
    )
    return model.eval()


def _separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return a depthwise 3x3 and a 1x1 convolution, each with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def depthwise() -> nn.Module:
    """Return a small MobileNet (Howard et al., 1704.04861) for images of 32 by 32, untrained."""
    widths = (32, 64, 128, 128, 256, 256, 256)
    strides = (2, 1, 2, 1, 2, 1)
    stem = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    )
    blocks = map(_separable, widths, widths[1:], strides)
    return nn.Sequential(
        stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)
    )


class _Encoder(nn.Module):
    """Attention with one projection for query, key and value, and two layers with GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(
            n, tokens, 3, self.heads, width // self.heads
        )
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(n, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al., 2010.11929) for images of 32 by 32."""

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, patch: int = 8
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2, width))
        self.blocks = nn.Sequential(*(_Encoder(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, 10) of images (N, 3, 32, 32)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))
