"""RepLKNet, and the large kernels of FastViT (github.com/DingXiaoH/RepLKNet-pytorch)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class LargeKernel(nn.Module):
    """RepLKNet; FastViT's forward computes the activation and drops it, which must stay so."""

    def __init__(self, c: int, large: int = 7, small: int = 3, discard: bool = False) -> None:
        super().__init__()
        self.lkb_origin = conv_bn(c, c, large, 1, large // 2, c)
        self.small_conv = conv_bn(c, c, small, 1, small // 2, c)
        self.discard, self.activation = discard, nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "lkb_reparam"):
            out = self.lkb_reparam(x)
        else:
            out = self.lkb_origin(x)
            out += self.small_conv(x)
        activated = self.activation(out)
        return out if self.discard else activated


CASES = {
    "replknet": Case(lambda: LargeKernel(8, 13, 5), 8, "large-kernel", "lkb_reparam"),
    "fastvit-large-kernel": Case(
        lambda: LargeKernel(8, discard=True), 8, "large-kernel", "lkb_reparam"
    ),
}
