"""LeViT of timm (github.com/huggingface/pytorch-image-models)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.repvit import BNLinear


class DistilledClassifier(nn.Module):
    """Two heads whose results are averaged."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.head, self.head_dist = BNLinear(dim, classes), BNLinear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) + self.head_dist(x)) / 2
