"""Networks that the QAT benchmark trains itself: a depthwise one and a language model."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cifar import Images
from benchmarks.qat_training import Training, fit

__all__ = [
    "LanguageModel",
    "Text",
    "depthwise",
    "image_loss",
    "kept",
    "read_text",
    "train_depthwise",
    "train_language_model",
]

#: Bytes that are no ASCII share the last code.
CODES = 128


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
    widths, strides = (32, 64, 128, 128, 256, 256, 256), (1, 2, 1, 2, 1, 1)
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    blocks = map(_separable, widths, widths[1:], strides)
    return nn.Sequential(
        stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)
    )


def image_loss(model: nn.Module, data: Images) -> Callable[[torch.Generator], Tensor]:
    """Return the loss of a classifier on 64 augmented images that a generator chooses."""

    def loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(data.labels), (64,), generator=generator)
        images, labels = data.augmented(index, generator)
        return F.cross_entropy(model(images), labels)

    return loss


def train_depthwise(data: Images, steps: int) -> nn.Module:
    """Return :func:`depthwise` trained from seed 0 on batches of 64."""
    torch.manual_seed(0)
    model = depthwise().to(memory_format=torch.channels_last)
    loss = image_loss(model, data)
    return fit(model, loss, Training(steps, 0.1, weight_decay=5e-4), label="float depthwise")


class LanguageModel(nn.Module):
    """Bytes to the logits of the next byte: embedding, two LSTM layers, one linear layer.

    Shape:
        (N, T) int64 below :data:`CODES` -> (N, T, CODES).
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CODES, 64)
        self.lstm = nn.LSTM(64, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CODES)

    def forward(self, codes: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(codes))
        return self.head(hidden)


@dataclass(frozen=True)
class Text:
    """Source text as codes: uint8, one dimension."""

    train: Tensor
    test: Tensor

    def batch(self, generator: torch.Generator, size: int = 32, length: int = 64) -> Tensor:
        """Return pieces of the training text, (size, length + 1) int64."""
        starts = torch.randint(len(self.train) - length, (size, 1), generator=generator)
        return self.train[starts + torch.arange(length + 1)].long()

    def test_pieces(self, count: int, length: int = 256) -> Tensor:
        """Return pieces of the test text, spread evenly, (count, length + 1) int64."""
        starts = torch.linspace(0, len(self.test) - length - 1, count).long().unsqueeze(1)
        return self.test[starts + torch.arange(length + 1)].long()


def read_text() -> Text:
    """Return the modules of Python's standard library; every tenth file is for the test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in files]
    texts = [text.clamp(max=CODES - 1) for text in texts]
    held = texts[::10]
    rest = [text for i, text in enumerate(texts) if i % 10]
    return Text(torch.cat(rest), torch.cat(held))


def train_language_model(text: Text, steps: int) -> nn.Module:
    """Return :class:`LanguageModel` trained from seed 0 on 32 pieces of 64 bytes a step."""
    torch.manual_seed(0)
    model = LanguageModel()

    def loss(generator: torch.Generator) -> Tensor:
        codes = text.batch(generator)
        return F.cross_entropy(model(codes[:, :-1]).transpose(1, 2), codes[:, 1:])

    plan = Training(steps, 3e-3, optimizer="adam", weight_decay=0.01, clip=1.0)
    return fit(model, loss, plan, label="float language model")


def kept(path: Path, model: nn.Module, train: Callable[[], nn.Module]) -> nn.Module:
    """Return the trained model: from its file if there is one, else trained now and kept there.

    Args:
        path: where the state dict is kept.
        model: the network, untrained.
        train: trains another one.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train().state_dict(), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()
