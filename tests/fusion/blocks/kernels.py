"""Blocks of many kernels: DBB, ACNet, RepLKNet, UniRepLKNet and VanillaNet."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.blocks.layers import Case, conv_bn

# -- Diverse Branch Block (github.com/DingXiaoH/DiverseBranchBlock).


class BNAndPad(nn.Module):
    """Pads with the BatchNorm's result for zero by item assignment, which torch.fx cannot trace."""

    def __init__(self, pad: int, c: int) -> None:
        super().__init__()
        self.bn, self.pad_pixels = nn.BatchNorm2d(c), pad

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(x)
        if self.pad_pixels:
            p = self.pad_pixels
            value = (
                self.bn.bias
                - self.bn.running_mean
                * self.bn.weight
                / torch.sqrt(self.bn.running_var + self.bn.eps)
            ).view(1, -1, 1, 1)
            out = F.pad(out, [p] * 4)
            out[:, :, :p], out[:, :, -p:], out[..., :p], out[..., -p:] = value, value, value, value
        return out


class IdConv1x1(nn.Module):
    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.conv, self.groups = nn.Conv2d(c, c, 1, groups=groups, bias=False), groups
        self.id_tensor = torch.zeros(c, c // groups, 1, 1)
        self.id_tensor[torch.arange(c), torch.arange(c) % (c // groups)] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight + self.id_tensor.to(x), groups=self.groups)


class DBB(nn.Module):
    def __init__(self, cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        p, self.nonlinear = k // 2, nn.ReLU()
        self.dbb_origin = conv_bn(cin, cout, k, stride, p, groups)
        if groups < cout:
            self.dbb_1x1 = conv_bn(cin, cout, 1, stride, 0, groups)
        self.dbb_avg = nn.Sequential()
        if groups < cout:
            self.dbb_avg.add_module("conv", nn.Conv2d(cin, cout, 1, groups=groups, bias=False))
            self.dbb_avg.add_module("bn", BNAndPad(p, cout))
        self.dbb_avg.add_module("avg", nn.AvgPool2d(k, stride, 0 if groups < cout else p))
        self.dbb_avg.add_module("avgbn", nn.BatchNorm2d(cout))
        self.dbb_1x1_kxk = nn.Sequential()
        same = cin == cout
        first = (
            IdConv1x1(cin, groups) if same else nn.Conv2d(cin, cin, 1, groups=groups, bias=False)
        )
        self.dbb_1x1_kxk.add_module("idconv1" if same else "conv1", first)
        self.dbb_1x1_kxk.add_module("bn1", BNAndPad(p, cin))
        self.dbb_1x1_kxk.add_module(
            "conv2", nn.Conv2d(cin, cout, k, stride, groups=groups, bias=False)
        )
        self.dbb_1x1_kxk.add_module("bn2", nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "dbb_reparam"):
            return self.nonlinear(self.dbb_reparam(x))
        out = self.dbb_origin(x)
        if hasattr(self, "dbb_1x1"):
            out = out + self.dbb_1x1(x)
        return self.nonlinear(out + self.dbb_avg(x) + self.dbb_1x1_kxk(x))


# -- ACNet (github.com/DingXiaoH/ACNet).


class ACBlock(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int = 3,
        padding: int = 1,
        stride: int = 1,
        groups: int = 1,
        affine: bool = True,
    ) -> None:
        super().__init__()
        self.deploy, self.crop = False, max(0, k // 2 - padding)
        pad = max(0, padding - k // 2)
        self.square_conv = nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=False)
        self.square_bn = nn.BatchNorm2d(cout, affine=affine)
        self.ver_conv = nn.Conv2d(
            cin, cout, (k, 1), stride, (padding, pad), groups=groups, bias=False
        )
        self.hor_conv = nn.Conv2d(
            cin, cout, (1, k), stride, (pad, padding), groups=groups, bias=False
        )
        self.ver_bn, self.hor_bn = (
            nn.BatchNorm2d(cout, affine=affine),
            nn.BatchNorm2d(cout, affine=affine),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.fused_conv(x)
        ver = x if self.crop == 0 else x[:, :, :, self.crop : -self.crop]
        hor = x if self.crop == 0 else x[:, :, self.crop : -self.crop, :]
        return (
            self.square_bn(self.square_conv(x))
            + self.ver_bn(self.ver_conv(ver))
            + self.hor_bn(self.hor_conv(hor))
        )


# -- RepLKNet, and the large kernels of FastViT (github.com/DingXiaoH/RepLKNet-pytorch).


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


# -- UniRepLKNet (github.com/AILab-CVC/UniRepLKNet).


class DilatedReparam(nn.Module):
    def __init__(
        self,
        c: int,
        k: int = 9,
        kernel_sizes: tuple[int, ...] = (5, 3, 3),
        dilates: tuple[int, ...] = (1, 2, 3),
    ) -> None:
        super().__init__()
        self.kernel_sizes, self.dilates = kernel_sizes, dilates
        self.lk_origin, self.origin_bn = (
            nn.Conv2d(c, c, k, 1, k // 2, groups=c, bias=False),
            nn.BatchNorm2d(c),
        )
        for size, rate in zip(kernel_sizes, dilates, strict=True):
            conv = nn.Conv2d(
                c, c, size, 1, (rate * (size - 1) + 1) // 2, rate, groups=c, bias=False
            )
            self.add_module(f"dil_conv_k{size}_{rate}", conv)
            self.add_module(f"dil_bn_k{size}_{rate}", nn.BatchNorm2d(c))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "origin_bn"):
            return self.lk_origin(x)
        out = self.origin_bn(self.lk_origin(x))
        for size, rate in zip(self.kernel_sizes, self.dilates, strict=True):
            out = out + getattr(self, f"dil_bn_k{size}_{rate}")(
                getattr(self, f"dil_conv_k{size}_{rate}")(x)
            )
        return out


# -- VanillaNet (github.com/huawei-noah/VanillaNet).


class VanillaActivation(nn.ReLU):
    def __init__(self, dim: int, act_num: int = 3) -> None:
        super().__init__()
        self.deploy, self.dim, self.act_num = False, dim, act_num
        self.weight = nn.Parameter(torch.randn(dim, 1, 2 * act_num + 1, 2 * act_num + 1))
        self.bias, self.bn = None, nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        out = F.conv2d(
            super().forward(x), self.weight, self.bias, padding=self.act_num, groups=self.dim
        )
        return out if self.deploy else self.bn(out)


class VanillaBlock(nn.Module):
    def __init__(self, cin: int, cout: int, act_learn: int = 1) -> None:
        super().__init__()
        self.act_learn, self.deploy = act_learn, False
        self.conv1 = nn.Sequential(nn.Conv2d(cin, cin, 1), nn.BatchNorm2d(cin))
        self.conv2 = nn.Sequential(nn.Conv2d(cin, cout, 1), nn.BatchNorm2d(cout))
        self.pool, self.act = nn.MaxPool2d(2), VanillaActivation(cout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if self.deploy else self.conv2(F.leaky_relu(self.conv1(x), self.act_learn))
        return self.act(self.pool(x))


class VanillaNet(nn.Module):
    def __init__(self, dims: tuple[int, ...] = (8, 12), classes: int = 5) -> None:
        super().__init__()
        first, last = dims[0], dims[-1]
        self.act_learn, self.deploy = 1.0, False
        self.stem1 = nn.Sequential(nn.Conv2d(3, first, 4, stride=4), nn.BatchNorm2d(first))
        self.stem2 = nn.Sequential(
            nn.Conv2d(first, first, 1), nn.BatchNorm2d(first), VanillaActivation(first)
        )
        self.stages = nn.ModuleList(VanillaBlock(*pair) for pair in pairwise(dims))
        self.cls1 = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Dropout(0.1),
            nn.Conv2d(last, classes, 1),
            nn.BatchNorm2d(classes),
        )
        self.cls2 = nn.Sequential(nn.Conv2d(classes, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            x = self.stem(x)
        else:
            x = self.stem2(F.leaky_relu(self.stem1(x), self.act_learn))
        for stage in self.stages:
            x = stage(x)
        if self.deploy:
            x = self.cls(x)
        else:
            x = self.cls2(F.leaky_relu(self.cls1(x), self.act_learn))
        return x.flatten(1)


CASES = {
    "dbb": Case(lambda: DBB(8, 8), 8, "dbb", "dbb_reparam"),
    "dbb-groups": Case(lambda: DBB(8, 8, groups=4), 8, "dbb", "dbb_reparam"),
    "dbb-depthwise": Case(lambda: DBB(8, 8, groups=8), 8, "dbb", "dbb_reparam"),
    "dbb-stride": Case(lambda: DBB(8, 12, 5, stride=2, groups=2), 8, "dbb", "dbb_reparam"),
    "acnet": Case(lambda: ACBlock(8, 12), 8, "acnet", "fused_conv"),
    "acnet-crop": Case(lambda: ACBlock(8, 8, k=5, padding=0, groups=2), 8, "acnet", "fused_conv"),
    "acnet-wide": Case(
        lambda: ACBlock(8, 8, padding=3, stride=2, affine=False), 8, "acnet", "fused_conv"
    ),
    "replknet": Case(lambda: LargeKernel(8, 13, 5), 8, "large-kernel", "lkb_reparam"),
    "fastvit-large-kernel": Case(
        lambda: LargeKernel(8, discard=True), 8, "large-kernel", "lkb_reparam"
    ),
    "unireplknet": Case(lambda: DilatedReparam(8), 8, "unireplknet", "lk_origin"),
    "vanillanet-activation": Case(
        lambda: VanillaActivation(8), 8, "vanillanet-activation", "weight"
    ),
    "vanillanet": Case(lambda: VanillaBlock(8, 12), 8, "vanillanet-block", "conv"),
    "vanillanet-whole": Case(VanillaNet, 3, "vanillanet", "stem"),
}
