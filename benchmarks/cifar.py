"""CIFAR-10 as JPEG files in a tar, and the networks trained on it, for the accuracy benchmarks.

The folder given as ``--data`` holds ``cifar10-jpeg-{train,test}.tar`` (members named
``SPLIT/CLASS/NNNN.jpg``) and state dicts.
"""

from __future__ import annotations

import argparse
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.harness import parser

__all__ = [
    "Images",
    "accuracy",
    "arguments",
    "logits",
    "read_both",
    "read_split",
    "resnet20",
    "some_batches",
    "train",
]

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

    def augmented(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a training batch: padded by 4, with one random crop, each image flipped or not."""
        images = F.pad(self.images[index], (4, 4, 4, 4))
        top, left = (int(torch.randint(0, 9, (), generator=generator)) for _ in range(2))
        images = images[..., top : top + 32, left : left + 32]
        flip = torch.rand(len(index), generator=generator) < 0.5
        return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images), self.labels[index]


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
            images.append((decode_image(data, ImageReadMode.RGB).float() / 255 - _MEAN) / _STD)
            labels.append(classes.index(member.name.split("/")[-2]))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return Images(torch.stack(images)[order], torch.tensor(labels)[order])


def some_batches(images: Tensor, count: int, seed: int, size: int = 64) -> list[Tensor]:
    """Return images that a seed chooses, without labels, in batches of ``size``."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return list(images[order[:count]].split(size))


def arguments(description: str | None, weights: str, train: int) -> argparse.ArgumentParser:
    """Return the parser of an accuracy benchmark; ``train`` is the default of ``--train``."""
    options = parser(description)
    options.add_argument(
        "--data", type=Path, required=True, help=f"folder with {weights} and the tars of images"
    )
    options.add_argument(
        "--images", type=int, default=2000, help="test images (default: %(default)s)"
    )
    options.add_argument(
        "--calibration",
        type=int,
        default=512,
        help="training images to calibrate on (default: %(default)s)",
    )
    options.add_argument(
        "--train", type=int, default=train, help="training images for QAT (default: %(default)s)"
    )
    options.add_argument(
        "--steps",
        type=int,
        default=200,
        help="QAT steps of 64 images; 0 leaves QAT out (default: %(default)s)",
    )
    return options


def read_both(options: argparse.Namespace) -> tuple[Images, Images, list[Tensor]]:
    """Return test images, training images, and batches of these to calibrate on.

    With ``--quick`` they are few, and there is one step of QAT at most.
    """
    options.steps = min(options.steps, 1) if options.quick else options.steps
    test = read_split(options.data, "test", 50 if options.quick else options.images)
    data = read_split(
        options.data, "train", 64 if options.quick else max(options.calibration, options.train)
    )
    return test, data, data.batches(64)[: max(1, options.calibration // 64)]


def train(
    model: nn.Module,
    data: Images,
    steps: int,
    lr: float,
    before: Callable[[int], None] | None = None,
) -> nn.Module:
    """Train for a while on the same batches of 64 in every run.

    The optimizer is SGD with momentum; the learning rate falls to 0 by a cosine.

    Args:
        model: trained in place.
        data: training images.
        steps: the number of training steps.
        lr: the learning rate at the start.
        before: called with the number of each step before it.
    """
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(
        torchq.qat.param_groups(model, lr=lr, weight_decay=1e-4), momentum=0.9
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for step in range(steps):
        if before is not None:
            before(step)
        images, labels = data.augmented(
            torch.randint(len(data.labels), (64,), generator=generator), generator
        )
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


class _Block(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))
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
                nn.Sequential(first, *(_Block(widths[stage], widths[stage], 1) for _ in range(2))),
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


@torch.no_grad()
def logits(model: nn.Module, data: Images, size: int = 250) -> Tensor:
    """Return the outputs of the model, (N, 10)."""
    return torch.cat([model(batch) for batch in data.batches(size)])


def accuracy(predicted: Tensor, data: Images) -> float:
    """Return the share of images, 0 to 1, whose largest logit is that of their label."""
    return (predicted.argmax(1) == data.labels).float().mean().item()
