"""The doctor finds nothing wrong with healthy networks of six families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock
from torchvision.models.segmentation import LRASPP

import torchq


class UNet(nn.Module):
    """Two levels, joined by a concatenation. Images (N, 3, H, W) with even H and W."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.middle(nn.functional.max_pool2d(skip, 2)))
        return self.last(torch.cat([skip, deep], 1))


class TextEncoder(nn.Module):
    """A classifier of texts that is called with keywords, as in Hugging Face's library."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        layers = (nn.TransformerEncoderLayer(24, 2, 48, batch_first=True) for _ in range(2))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(24, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.blocks(self.embedding(input_ids))
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        return {"logits": self.head(x.mean(1))}


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=generator)


def texts(generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(50, (4, 7), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def mobilenet() -> nn.Module:
    """Return a MobileNet v2 of few blocks: expansion, channels, blocks, stride."""
    blocks = [[1, 8, 1, 1], [4, 12, 3, 2]]
    return models.MobileNetV2(num_classes=5, inverted_residual_setting=blocks)


def segmentation() -> nn.Module:
    """Return LR-ASPP on a MobileNet v3 of few blocks."""
    rows = [(16, 3, 16, 16, False, "RE", 1), *[(16, 3, 32, 16, True, "HS", 1)] * 3]
    blocks = [InvertedResidualConfig(*row, dilation=1, width_mult=1.0) for row in rows]
    features = models.MobileNetV3(blocks, last_channel=32).features
    backbone = IntermediateLayerGetter(features, {"2": "low", "5": "high"})
    return LRASPP(backbone, low_channels=16, high_channels=96, num_classes=4, inter_channels=16)


def vision_transformer() -> nn.Module:
    return models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5)


#: Kind of network -> what makes one with random weights, and what makes a batch.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "resnet": (lambda: models.ResNet(BasicBlock, [1, 2, 1, 1], num_classes=5), images),
    "mobilenet": (mobilenet, images),
    "vision transformer": (vision_transformer, images),
    "segmentation": (segmentation, images),
    "u-net": (UNet, images),
    "text encoder": (TextEncoder, texts),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_networks_have_no_error(family: str) -> None:
    torch.manual_seed(0)
    build, batch = FAMILIES[family]
    generator = torch.Generator().manual_seed(3)
    model, batches = build().eval(), [batch(generator) for _ in range(2)]
    torchq.fuse_(model, batches[0], progress=False)
    torchq.quantize_(model)
    torchq.calibrate(model, batches, on_unseen="dynamic", progress=False)
    report = torchq.doctor(model, batches, progress=False)
    assert report.errors == report.of("warning") == (), str(report)
    # Random networks may have channels of zeros; nothing else is to be said about them.
    assert {finding.kind for finding in report.findings} <= {"zero_range"}
