"""Mobile networks: MobileOne, FastViT, GhostNetV3, RepGhost, RepViT, LeViT, and timm's."""

import torch
from torch import Tensor, nn

from tests.fusion.blocks.layers import (
    SE,
    BatchNormAct,
    Case,
    ConvNormAct,
    DropPath,
    LayerScale,
    conv_bn,
)

# -- MobileOne and FastViT (github.com/apple/ml-mobileone, github.com/apple/ml-fastvit).


class MobileOne(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int = 3,
        stride: int = 1,
        groups: int = 1,
        branches: int = 2,
        scale: bool = True,
    ) -> None:
        super().__init__()
        self.inference_mode = False
        self.se = SE(cout)
        self.activation = nn.GELU()
        self.rbr_skip = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_conv = nn.ModuleList(
            conv_bn(cin, cout, k, stride, k // 2, groups) for _ in range(branches)
        )
        self.rbr_scale = (
            conv_bn(cin, cout, 1, stride, 0, groups) if scale and k > 1 else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.inference_mode:
            return self.activation(self.se(self.reparam_conv(x)))
        out = 0 if self.rbr_skip is None else self.rbr_skip(x)
        out = out + (0 if self.rbr_scale is None else self.rbr_scale(x))
        for conv in self.rbr_conv:
            out = out + conv(x)
        return self.activation(self.se(out))


class RepCPE(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.pe = nn.Conv2d(c, c, 7, 1, 3, groups=c)

    def forward(self, x: Tensor) -> Tensor:
        return self.reparam_conv(x) if hasattr(self, "reparam_conv") else self.pe(x) + x


# -- RepVGG and MobileOne of timm (github.com/huggingface/pytorch-image-models).


class TimmRepVgg(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.reparam_conv = None
        self.identity = (
            BatchNormAct(cout, False) if cin == cout and stride == 1 else None
        )
        self.conv_kxk = ConvNormAct(cin, cout, 3, stride, groups)
        self.conv_1x1 = ConvNormAct(cin, cout, 1, stride, groups)
        self.drop_path = DropPath()
        self.attn = SE(cout)
        self.act = nn.ReLU()

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
        self,
        cin: int,
        cout: int,
        stride: int = 1,
        groups: int = 1,
        se: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.reparam_conv = None
        self.identity = (
            BatchNormAct(cout, False) if cin == cout and stride == 1 else None
        )
        self.conv_kxk = nn.ModuleList(
            ConvNormAct(cin, cout, 3, stride, groups) for _ in range(3)
        )
        self.conv_scale = ConvNormAct(cin, cout, 1, stride, groups)
        self.drop_path = DropPath()
        self.act = nn.ReLU()
        setattr(self, "se" if se else "attn", se or nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        behind = self.se if hasattr(self, "se") else self.attn
        if self.reparam_conv is not None:
            return self.act(behind(self.reparam_conv(x)))
        out = self.conv_scale(x) + (0 if self.identity is None else self.identity(x))
        for conv in self.conv_kxk:
            out = out + conv(x)
        return self.act(behind(self.drop_path(out)))


# -- FastViT of timm (github.com/huggingface/pytorch-image-models).


class TimmLargeKernel(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reparam_conv = None
        self.large_conv = ConvNormAct(c, c, 7, 1, c)
        self.small_conv = ConvNormAct(c, c, 3, 1, c)
        self.se = SE(c)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        if self.reparam_conv is not None:
            return self.act(self.se(self.reparam_conv(x)))
        return self.act(self.se(self.large_conv(x) + self.small_conv(x)))


class RepMixer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reparam_conv = None
        self.norm, self.mixer = (TimmMobileOne(c, c, groups=c) for _ in range(2))
        self.norm.act, self.mixer.act = nn.Identity(), nn.Identity()
        self.norm.conv_kxk = nn.ModuleList()
        self.norm.conv_scale = nn.Conv2d(c, c, 1, groups=c)
        self.layer_scale = LayerScale(c)

    def forward(self, x: Tensor) -> Tensor:
        if self.reparam_conv is not None:
            return self.reparam_conv(x)
        return x + self.layer_scale(self.mixer(x) - self.norm(x))


class TimmRepCPE(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reparam_conv = None
        self.pos_enc = nn.Conv2d(c, c, 7, 1, 3, groups=c)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.pos_enc(x) + x if self.reparam_conv is None else self.reparam_conv(x)
        )


# -- GhostNetV3 (github.com/huawei-noah/Efficient-AI-Backbones).


class GhostV3(nn.Module):
    def __init__(self, cin: int, mid: int) -> None:
        super().__init__()
        self.infer_mode = False
        self.primary_conv = nn.Identity()
        self.cheap_operation = nn.Identity()
        self.primary_rpr_skip = None
        self.primary_rpr_scale = None
        self.primary_rpr_conv = nn.ModuleList(conv_bn(cin, mid, 1) for _ in range(3))
        self.cheap_rpr_skip = nn.BatchNorm2d(mid)
        self.cheap_rpr_conv = nn.ModuleList(
            conv_bn(mid, mid, 3, 1, 1, mid) for _ in range(3)
        )
        self.cheap_rpr_scale = conv_bn(mid, mid, 1, groups=mid)
        self.primary_activation = nn.ReLU()
        self.cheap_activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.infer_mode:
            one = self.primary_conv(x)
            return torch.cat([one, self.cheap_operation(one)], 1)
        one = self.primary_activation(sum(conv(x) for conv in self.primary_rpr_conv))
        branches = self.cheap_rpr_skip, self.cheap_rpr_scale, *self.cheap_rpr_conv
        return torch.cat([one, self.cheap_activation(sum(b(one) for b in branches))], 1)


class GhostV3Bottleneck(nn.Module):
    """Only its strided form sums branches of its own, between two modules that do too."""

    def __init__(self, cin: int, mid: int) -> None:
        super().__init__()
        self.infer_mode = False
        self.conv_dw = nn.Identity()
        self.bn_dw = nn.Identity()
        self.ghost1 = GhostV3(cin, mid)
        self.ghost2 = GhostV3(2 * mid, mid)
        c = 2 * mid
        self.dw_rpr_conv = nn.ModuleList(conv_bn(c, c, 3, 2, 1, c) for _ in range(3))
        self.dw_rpr_scale = conv_bn(c, c, 1, 2, groups=c)
        self.dw_rpr_skip = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.ghost1(x)
        if self.infer_mode:
            return self.ghost2(self.bn_dw(self.conv_dw(x)))
        out = self.dw_rpr_scale(x)
        for conv in self.dw_rpr_conv:
            out += conv(x)
        return self.ghost2(out)


# -- RepGhost (github.com/ChengpengChen/RepGhost).


class RepGhost(nn.Module):
    def __init__(self, cin: int, mid: int) -> None:
        super().__init__()
        self.primary_conv = nn.Sequential(*conv_bn(cin, mid, 1), nn.ReLU())
        self.fusion_conv = nn.ModuleList([nn.Identity()])
        self.fusion_bn = nn.ModuleList([nn.BatchNorm2d(mid)])
        self.cheap_operation = nn.Sequential(*conv_bn(mid, mid, 3, 1, 1, mid))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        one = self.primary_conv(x)
        two = self.cheap_operation(one)
        for conv, bn in zip(self.fusion_conv, self.fusion_bn, strict=True):
            two = two + bn(conv(one))
        return self.relu(two)


# -- RepViT (github.com/THU-MIG/RepViT).


class RepVGGDW(nn.Module):
    """RepViT: its fuse() returns a convolution that takes the block's place."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = conv_bn(c, c, 3, 1, 1, c, conv="c")
        self.conv1 = nn.Conv2d(c, c, 1, groups=c)
        self.bn = nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn((self.conv(x) + self.conv1(x)) + x)


class Residual(nn.Module):
    def __init__(self, m: nn.Module, drop: float = 0.0) -> None:
        super().__init__()
        self.m = m
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop > 0:
            return x + self.m(x) * torch.rand(x.size(0), 1, 1, 1)
        return x + self.m(x)


class Classifier(nn.Module):
    """Two heads, one of them trained on a teacher, whose results are averaged.

    LeViT of timm calls them ``head`` and ``head_dist``.
    """

    def __init__(self, dim: int, classes: int, name: str = "classifier") -> None:
        super().__init__()
        self.name = name
        for head in (name, f"{name}_dist"):
            setattr(
                self, head, nn.Sequential(nn.BatchNorm1d(dim), nn.Linear(dim, classes))
            )

    def forward(self, x: Tensor) -> Tensor:
        return (getattr(self, self.name)(x) + getattr(self, f"{self.name}_dist")(x)) / 2


# -- LeViT (github.com/facebookresearch/LeViT).


class LinearNorm(nn.Module):
    """LeViT: BatchNorm over the features of tokens, through a flatten."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.linear = nn.Linear(a, b, bias=False)
        self.bn = nn.BatchNorm1d(b)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape_as(x)


REPARAM = "reparam_conv"
CASES = {
    "mobileone": Case(lambda: MobileOne(8, 8, branches=3), "mobileone", REPARAM),
    "mobileone-depthwise": Case(lambda: MobileOne(8, 8, 3, 2, 8), "mobileone", REPARAM),
    "mobileone-pointwise": Case(lambda: MobileOne(8, 12, k=1), "mobileone", REPARAM),
    "mobileone-skip": Case(
        lambda: MobileOne(8, 8, branches=0, scale=False), "mobileone", REPARAM
    ),
    "repcpe": Case(lambda: RepCPE(8), "repcpe", REPARAM),
    "timm-repvgg": Case(lambda: TimmRepVgg(8, 8), "timm", REPARAM),
    "timm-repvgg-groups": Case(lambda: TimmRepVgg(8, 16, 2, 4), "timm", REPARAM),
    "timm-mobileone": Case(lambda: TimmMobileOne(8, 8, groups=8), "timm", REPARAM),
    "timm-mobileone-se": Case(lambda: TimmMobileOne(8, 8, se=SE(8)), "timm", REPARAM),
    "timm-large-kernel": Case(lambda: TimmLargeKernel(8), "timm-large-kernel", REPARAM),
    "repmixer": Case(lambda: RepMixer(8), "repmixer", REPARAM),
    "timm-repcpe": Case(lambda: TimmRepCPE(8), "timm-repcpe", REPARAM),
    "ghostnetv3": Case(lambda: GhostV3(8, 6), "ghostnetv3", "primary_conv"),
    "ghostnetv3-strided": Case(
        lambda: GhostV3Bottleneck(8, 6), "ghostnetv3-bottleneck", "conv_dw"
    ),
    "repghost": Case(lambda: RepGhost(8, 6), "repghost", "cheap_operation"),
    "repvit-dw": Case(lambda: RepVGGDW(8), "repvit-depthwise", None),
    "repvit-residual": Case(
        lambda: Residual(conv_bn(8, 8, 3, 1, 1, 8)), "repvit-residual", None
    ),
    "repvit-nested": Case(lambda: Residual(RepVGGDW(8)), "repvit-residual", None),
}
