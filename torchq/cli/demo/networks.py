"""The networks of ``torchq demo``: its own small one, and known architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from torchq.cli.demo.data import DemoNet, Split
from torchq.errors import MissingExtraError


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
