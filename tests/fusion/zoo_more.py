"""Small blocks with the structure and attribute names of MobileOne, FastViT, timm, DBB, ACNet, large-kernel and VanillaNet families."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.fusion.zoo import SE, conv_bn


class MobileOne(nn.Module):
    def __init__(self, cin, cout, k=3, stride=1, groups=1, branches=2, scale=True):
        super().__init__()
        self.inference_mode = False
        self.se, self.activation = SE(cout), nn.GELU()
        self.rbr_skip = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_conv = nn.ModuleList(
            conv_bn(cin, cout, k, stride, k // 2, groups) for _ in range(branches)
        )
        self.rbr_scale = conv_bn(cin, cout, 1, stride, 0, groups) if scale and k > 1 else None

    def forward(self, x):
        if self.inference_mode:
            return self.activation(self.se(self.reparam_conv(x)))
        out = 0 if self.rbr_skip is None else self.rbr_skip(x)
        out = out + (0 if self.rbr_scale is None else self.rbr_scale(x))
        for conv in self.rbr_conv:
            out = out + conv(x)
        return self.activation(self.se(out))


class MMMobileOne(nn.Module):
    def __init__(self, cin, cout, groups=1):
        super().__init__()
        self.deploy = False
        self.branch_conv_list = nn.ModuleList(
            conv_bn(cin, cout, 3, 1, 1, groups, bn="norm") for _ in range(3)
        )
        self.branch_scale, self.branch_norm = (
            conv_bn(cin, cout, 1, groups=groups, bn="norm"),
            nn.BatchNorm2d(cin),
        )
        self.se_layer, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        if self.deploy:
            return self.act(self.se_layer(self.branch_reparam(x)))
        out = sum(branch(x) for branch in self.branch_conv_list)
        out = out + self.branch_scale(x) + self.branch_norm(x)
        return self.act(self.se_layer(out))


class LargeKernel(nn.Module):
    """RepLKNet; FastViT's forward computes the activation and throws it away, which must stay so."""

    def __init__(self, c, large=7, small=3, discard=False):
        super().__init__()
        self.lkb_origin = conv_bn(c, c, large, 1, large // 2, c)
        self.small_conv = conv_bn(c, c, small, 1, small // 2, c)
        self.discard, self.activation = discard, nn.GELU()

    def forward(self, x):
        if hasattr(self, "lkb_reparam"):
            out = self.lkb_reparam(x)
        else:
            out = self.lkb_origin(x)
            out += self.small_conv(x)
        activated = self.activation(out)
        return out if self.discard else activated


class BatchNormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a BatchNorm with drop and activation inside."""

    def __init__(self, c, act=True):
        super().__init__(c)
        self.drop, self.act = nn.Identity(), nn.ReLU() if act else nn.Identity()

    def forward(self, x):
        torch._assert(x.ndim == 4, "expected 4 dimensions")
        return self.act(
            self.drop(
                F.batch_norm(
                    x,
                    self.running_mean,
                    self.running_var,
                    self.weight,
                    self.bias,
                    False,
                    0.1,
                    self.eps,
                )
            )
        )


class ConvNormAct(nn.Module):
    def __init__(self, cin, cout, k, stride=1, groups=1, act=False):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False)
        self.bn = BatchNormAct(cout, act)

    def forward(self, x):
        return self.bn(self.conv(x))


class DropPath(nn.Module):
    def forward(self, x):
        return x if not self.training else x * torch.bernoulli(torch.tensor(0.5))


class TimmRepVgg(nn.Module):
    def __init__(self, cin, cout, stride=1, groups=1):
        super().__init__()
        self.reparam_conv = None
        self.identity = BatchNormAct(cout, False) if cin == cout and stride == 1 else None
        self.conv_kxk, self.conv_1x1 = (
            ConvNormAct(cin, cout, 3, stride, groups),
            ConvNormAct(cin, cout, 1, stride, groups),
        )
        self.drop_path, self.attn, self.act = DropPath(), SE(cout), nn.ReLU()

    def forward(self, x):
        if self.reparam_conv is not None:
            return self.act(self.attn(self.reparam_conv(x)))
        if self.identity is None:
            return self.act(self.attn(self.conv_1x1(x) + self.conv_kxk(x)))
        out = self.drop_path(self.conv_1x1(x) + self.conv_kxk(x))
        return self.act(self.attn(out + self.identity(x)))


class TimmMobileOne(nn.Module):
    """FastViT's has ``se`` between the sum and the activation, ByobNet's ``attn``."""

    def __init__(self, cin, cout, stride=1, groups=1, se=None):
        super().__init__()
        self.reparam_conv = None
        self.identity = BatchNormAct(cout, False) if cin == cout and stride == 1 else None
        self.conv_kxk = nn.ModuleList(ConvNormAct(cin, cout, 3, stride, groups) for _ in range(3))
        self.conv_scale = ConvNormAct(cin, cout, 1, stride, groups)
        self.drop_path, self.act = DropPath(), nn.ReLU()
        setattr(self, "se" if se else "attn", se or nn.Identity())

    def forward(self, x):
        behind = self.se if hasattr(self, "se") else self.attn
        if self.reparam_conv is not None:
            return self.act(behind(self.reparam_conv(x)))
        out = self.conv_scale(x) + (0 if self.identity is None else self.identity(x))
        for conv in self.conv_kxk:
            out = out + conv(x)
        return self.act(behind(self.drop_path(out)))


class TimmLargeKernel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.reparam_conv = None
        self.large_conv, self.small_conv = ConvNormAct(c, c, 7, 1, c), ConvNormAct(c, c, 3, 1, c)
        self.se, self.act = SE(c), nn.GELU()

    def forward(self, x):
        out = (
            self.large_conv(x) + self.small_conv(x)
            if self.reparam_conv is None
            else self.reparam_conv(x)
        )
        return self.act(self.se(out))


class LayerScale(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(c, 1, 1))

    def forward(self, x):
        return x * self.gamma


class RepMixer(nn.Module):
    def __init__(self, c):
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

    def forward(self, x):
        if self.reparam_conv is not None:
            return self.reparam_conv(x)
        return x + self.layer_scale(self.mixer(x) - self.norm(x))


class RepCPE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.pe = nn.Conv2d(c, c, 7, 1, 3, groups=c)

    def forward(self, x):
        return self.reparam_conv(x) if hasattr(self, "reparam_conv") else self.pe(x) + x


class TimmRepCPE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.reparam_conv, self.pos_enc = None, nn.Conv2d(c, c, 7, 1, 3, groups=c)

    def forward(self, x):
        return self.pos_enc(x) + x if self.reparam_conv is None else self.reparam_conv(x)


class GhostV3(nn.Module):
    def __init__(self, cin, mid):
        super().__init__()
        self.infer_mode = False
        self.primary_conv, self.cheap_operation = nn.Identity(), nn.Identity()
        self.primary_rpr_skip, self.primary_rpr_scale = None, None
        self.primary_rpr_conv = nn.ModuleList(conv_bn(cin, mid, 1) for _ in range(3))
        self.cheap_rpr_skip = nn.BatchNorm2d(mid)
        self.cheap_rpr_conv = nn.ModuleList(conv_bn(mid, mid, 3, 1, 1, mid) for _ in range(3))
        self.cheap_rpr_scale = conv_bn(mid, mid, 1, groups=mid)
        self.primary_activation, self.cheap_activation = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        if self.infer_mode:
            one = self.primary_conv(x)
            return torch.cat([one, self.cheap_operation(one)], 1)
        one = self.primary_activation(sum(conv(x) for conv in self.primary_rpr_conv))
        two = (
            self.cheap_rpr_skip(one)
            + self.cheap_rpr_scale(one)
            + sum(conv(one) for conv in self.cheap_rpr_conv)
        )
        return torch.cat([one, self.cheap_activation(two)], 1)


class GhostV3Bottleneck(nn.Module):
    """Only its strided form sums branches of its own, between two modules that do too."""

    def __init__(self, cin, mid):
        super().__init__()
        self.infer_mode = False
        self.conv_dw, self.bn_dw = nn.Identity(), nn.Identity()
        self.ghost1, self.ghost2 = GhostV3(cin, mid), GhostV3(2 * mid, mid)
        self.dw_rpr_conv = nn.ModuleList(
            conv_bn(2 * mid, 2 * mid, 3, 2, 1, 2 * mid) for _ in range(3)
        )
        self.dw_rpr_scale, self.dw_rpr_skip = conv_bn(2 * mid, 2 * mid, 1, 2, groups=2 * mid), None

    def forward(self, x):
        x = self.ghost1(x)
        if self.infer_mode:
            return self.ghost2(self.bn_dw(self.conv_dw(x)))
        out = self.dw_rpr_scale(x)
        for conv in self.dw_rpr_conv:
            out += conv(x)
        return self.ghost2(out)


class RepGhost(nn.Module):
    def __init__(self, cin, mid):
        super().__init__()
        self.primary_conv = nn.Sequential(
            nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU()
        )
        self.fusion_conv, self.fusion_bn = (
            nn.ModuleList([nn.Identity()]),
            nn.ModuleList([nn.BatchNorm2d(mid)]),
        )
        self.cheap_operation = nn.Sequential(
            nn.Conv2d(mid, mid, 3, 1, 1, groups=mid, bias=False), nn.BatchNorm2d(mid)
        )
        self.relu = nn.ReLU()

    def forward(self, x):
        one = self.primary_conv(x)
        two = self.cheap_operation(one)
        for conv, bn in zip(self.fusion_conv, self.fusion_bn, strict=True):
            two = two + bn(conv(one))
        return self.relu(two)
