"""RepVGG and MobileOne of timm (github.com/huggingface/pytorch-image-models)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import SE, BatchNormAct, ConvNormAct, DropPath


class TimmRepVgg(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.reparam_conv = None
        self.identity = BatchNormAct(cout, False) if cin == cout and stride == 1 else None
        self.conv_kxk, self.conv_1x1 = (
            ConvNormAct(cin, cout, 3, stride, groups),
            ConvNormAct(cin, cout, 1, stride, groups),
        )
        self.drop_path, self.attn, self.act = DropPath(), SE(cout), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.reparam_conv is not None:
            return self.act(self.attn(self.reparam_conv(x)))
        if self.identity is None:
            return self.act(self.attn(self.conv_1x1(x) + self.conv_kxk(x)))
        out = self.drop_path(self.conv_1x1(x) + self.conv_kxk(x))
        return self.act(self.attn(out + self.identity(x)))


class TimmMobileOne(nn.Module):
    """FastViT's has ``se`` between the sum and the activation, ByobNet's ``attn``."""

    def __init__(
        self, cin: int, cout: int, stride: int = 1, groups: int = 1, se: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.reparam_conv = None
        self.identity = BatchNormAct(cout, False) if cin == cout and stride == 1 else None
        self.conv_kxk = nn.ModuleList(ConvNormAct(cin, cout, 3, stride, groups) for _ in range(3))
        self.conv_scale = ConvNormAct(cin, cout, 1, stride, groups)
        self.drop_path, self.act = DropPath(), nn.ReLU()
        setattr(self, "se" if se else "attn", se or nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        behind = self.se if hasattr(self, "se") else self.attn
        if self.reparam_conv is not None:
            return self.act(behind(self.reparam_conv(x)))
        out = self.conv_scale(x) + (0 if self.identity is None else self.identity(x))
        for conv in self.conv_kxk:
            out = out + conv(x)
        return self.act(behind(self.drop_path(out)))


CASES = {
    "timm-repvgg": Case(lambda: TimmRepVgg(8, 8), 8, "timm", "reparam_conv"),
    "timm-repvgg-groups": Case(lambda: TimmRepVgg(8, 16, 2, 4), 8, "timm", "reparam_conv"),
    "timm-mobileone": Case(lambda: TimmMobileOne(8, 8, groups=8), 8, "timm", "reparam_conv"),
    "timm-mobileone-se": Case(lambda: TimmMobileOne(8, 8, se=SE(8)), 8, "timm", "reparam_conv"),
}
