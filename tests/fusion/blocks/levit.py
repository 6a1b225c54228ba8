"""LeViT (github.com/facebookresearch/LeViT)."""

from __future__ import annotations

from torch import Tensor, nn


class LinearNorm(nn.Module):
    """LeViT: BatchNorm over the features of tokens, through a flatten."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(a, b, bias=False), nn.BatchNorm1d(b)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape_as(x)
