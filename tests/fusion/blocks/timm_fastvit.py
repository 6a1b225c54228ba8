"""FastViT of timm (github.com/huggingface/pytorch-image-models)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import SE, ConvNormAct, LayerScale
from tests.fusion.blocks.timm_byobnet import TimmMobileOne


class TimmLargeKernel(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reparam_conv = None
        self.large_conv, self.small_conv = ConvNormAct(c, c, 7, 1, c), ConvNormAct(c, c, 3, 1, c)
        self.se, self.act = SE(c), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out = (
            self.large_conv(x) + self.small_conv(x)
            if self.reparam_conv is None
            else self.reparam_conv(x)
        )
        return self.act(self.se(out))


class RepMixer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reparam_conv = None
        self.norm = TimmMobileOne(c, c, groups=c)
        self.norm.act, self.norm.conv_kxk, self.norm.conv_scale = (
            nn.Identity(),
            nn.ModuleList(),
            nn.Conv2d(c, c, 1, groups=c),
        )
        self.mixer = TimmMobileOne(c, c, groups=c)
        self.mixer.act, self.layer_scale = nn.Identity(), LayerScale(c)

    def forward(self, x: Tensor) -> Tensor:
        if self.reparam_conv is not None:
            return self.reparam_conv(x)
        return x + self.layer_scale(self.mixer(x) - self.norm(x))


class TimmRepCPE(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reparam_conv, self.pos_enc = None, nn.Conv2d(c, c, 7, 1, 3, groups=c)

    def forward(self, x: Tensor) -> Tensor:
        return self.pos_enc(x) + x if self.reparam_conv is None else self.reparam_conv(x)


CASES = {
    "timm-large-kernel": Case(lambda: TimmLargeKernel(8), 8, "timm-large-kernel", "reparam_conv"),
    "repmixer": Case(lambda: RepMixer(8), 8, "repmixer", "reparam_conv"),
    "timm-repcpe": Case(lambda: TimmRepCPE(8), 8, "timm-repcpe", "reparam_conv"),
}
