"""Data and networks of ``torchq demo``: the digits of scikit-learn, and what learns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import MissingExtraError
from torchq.utils import progress_bar


@dataclass(frozen=True)
class Split:
    """Images (N, 1, 8, 8) float32 in 0..1, and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches in order; the last one may be smaller."""
        return list(zip(self.images.split(size), self.labels.split(size), strict=True))


def load_digits(seed: int = 0) -> tuple[Split, Split]:
    """Return 1797 scanned digits of 8x8 pixels, shuffled: 1200 to train and 597 to test.

    Source: UCI ML repository, Alpaydin and Kaynak (1998).
    """
    try:
        from sklearn.datasets import load_digits as read  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError(
            "torchq demo needs scikit-learn, which is not installed. Run pip install 'torchq[demo]'"
        ) from None
    digits = read()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    first, rest = order[:1200], order[1200:]
    return Split(images[first], labels[first]), Split(images[rest], labels[rest])


class ConvBN(nn.Sequential):
    """A convolution and its BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)


class RepVGGBlock(nn.Module):
    """Three parallel branches in training, one 3x3 convolution after :func:`torchq.fuse_`.

    Reference: Ding et al., RepVGG: Making VGG-style ConvNets Great Again (CVPR 2021), figure 4.
    """

    rbr_reparam: nn.Module

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.rbr_dense = ConvBN(inputs, outputs, 3, stride)
        self.rbr_1x1 = ConvBN(inputs, outputs, 1, stride)
        self.rbr_identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        self.nonlinearity = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the branches that are there, after ReLU."""
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.rbr_reparam(x))
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.nonlinearity(self.rbr_dense(x) + self.rbr_1x1(x) + identity)


class DemoNet(nn.Sequential):
    """Nine RepVGG blocks in three stages, global average pooling and a linear layer.

    Shape: (N, 1, 8, 8) -> (N, 10) logits.
    """

    def __init__(self, width: int = 16) -> None:
        blocks, inputs = [], 1
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(3):
                blocks.append(RepVGGBlock(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


@dataclass(frozen=True)
class Network:
    """One network that the demo trains.

    Attributes:
        title: for the output.
        build: makes it, with random weights and ten classes.
        epochs: of training in FP32.
        lr: the learning rate at the start.
        size: the digits are enlarged to images of three channels of this size; None leaves them.
        fine_tuned: W4A4 is trained too, which takes as long again.
    """

    title: str
    build: Callable[[], nn.Module]
    epochs: int
    lr: float
    size: int | None = None
    fine_tuned: bool = False

    def prepared(self, data: Split) -> Split:
        """Return the digits as this network takes them."""
        if self.size is None:
            return data
        images = F.interpolate(data.images, (self.size, self.size), mode="bilinear")
        return Split(images.expand(-1, 3, -1, -1).contiguous(), data.labels)


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        try:
            from torchvision import models  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError(
                f"demo --model {name}: torchvision cannot be imported ({error}); "
                "expected the build for this torch"
            ) from None
        if name == "vit":
            return models.VisionTransformer(32, 4, 4, 4, 64, 128, num_classes=10)
        found: nn.Module = models.get_model(name, weights=None, num_classes=10)
        return found

    return build


#: Name of ``--model`` -> network.
NETWORKS: dict[str, Network] = {
    "repvgg": Network("a small RepVGG", DemoNet, 12, 3e-3, fine_tuned=True),
    "resnet18": Network("ResNet-18 of torchvision", _torchvision("resnet18"), 4, 2e-3, 32),
    "mobilenet_v2": Network(
        "MobileNet v2 of torchvision", _torchvision("mobilenet_v2"), 6, 3e-3, 32
    ),
    "vit": Network(
        "a vision transformer of torchvision's class, 4 layers of width 64",
        _torchvision("vit"),
        12,
        2e-3,
        32,
    ),
}


def train(
    model: nn.Module,
    data: Split,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    seed: int = 0,
    size: int = 64,
) -> None:
    """Train with cross entropy and a cosine schedule behind a bar; leave it in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(data.labels) // size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in progress_bar(range(epochs), description="train", unit="epoch"):
        for index in torch.randperm(len(data.labels), generator=generator).split(size):
            loss = F.cross_entropy(model(data.images[index]), data.labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def predictions(model: nn.Module, data: Split) -> Tensor:
    """Return the class of each image, (N,)."""
    return torch.cat([model(images).argmax(1) for images, _ in data.batches(200)])


def accuracy(predicted: Tensor, data: Split) -> float:
    """Return the fraction of right predictions."""
    return (predicted == data.labels).float().mean().item()
