"""Blocks of many kernels: DBB, ACNet, RepLKNet, UniRepLKNet and VanillaNet."""

from collections import OrderedDict
from functools import partial
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
        self.bn = nn.BatchNorm2d(c)
        self.pad_pixels = pad

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(x)
        if self.pad_pixels:
            p = self.pad_pixels
            bn = self.bn
            scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
            value = (bn.bias - bn.running_mean * scale).view(1, -1, 1, 1)
            out = F.pad(out, [p] * 4)
            out[:, :, :p], out[:, :, -p:], out[..., :p], out[..., -p:] = (
                value,
                value,
                value,
                value,
            )
        return out


class IdConv1x1(nn.Module):
    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c, c, 1, groups=groups, bias=False)
        self.groups = groups
        self.id_tensor = torch.zeros(c, c // groups, 1, 1)
        self.id_tensor[torch.arange(c), torch.arange(c) % (c // groups)] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight + self.id_tensor.to(x), groups=self.groups)


class DBB(nn.Module):
    def __init__(
        self, cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        p = k // 2
        self.nonlinear = nn.ReLU()
        self.dbb_origin = conv_bn(cin, cout, k, stride, p, groups)
        conv = partial(nn.Conv2d, groups=groups, bias=False)
        pool: dict[str, nn.Module] = {}
        if groups < cout:
            self.dbb_1x1 = conv_bn(cin, cout, 1, stride, 0, groups)
            pool |= {"conv": conv(cin, cout, 1), "bn": BNAndPad(p, cout)}
        pool["avg"] = nn.AvgPool2d(k, stride, 0 if groups < cout else p)
        self.dbb_avg = nn.Sequential(OrderedDict(pool, avgbn=nn.BatchNorm2d(cout)))
        first = (
            {"idconv1": IdConv1x1(cin, groups)}
            if cin == cout
            else {"conv1": conv(cin, cin, 1)}
        )
        rest = {"bn1": BNAndPad(p, cin), "conv2": conv(cin, cout, k, stride)}
        self.dbb_1x1_kxk = nn.Sequential(
            OrderedDict(**first, **rest, bn2=nn.BatchNorm2d(cout))
        )

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
        self.deploy = False
        self.crop = max(0, k // 2 - padding)
        pad = max(0, padding - k // 2)
        conv = partial(nn.Conv2d, cin, cout, stride=stride, groups=groups, bias=False)
        self.square_conv = conv(k, padding=padding)
        self.ver_conv = conv((k, 1), padding=(padding, pad))
        self.hor_conv = conv((1, k), padding=(pad, padding))
        for name in ("square_bn", "ver_bn", "hor_bn"):
            setattr(self, name, nn.BatchNorm2d(cout, affine=affine))

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.fused_conv(x)
        ver = x if self.crop == 0 else x[:, :, :, self.crop : -self.crop]
        hor = x if self.crop == 0 else x[:, :, self.crop : -self.crop, :]
        out = self.square_bn(self.square_conv(x)) + self.ver_bn(self.ver_conv(ver))
        return out + self.hor_bn(self.hor_conv(hor))


# -- RepLKNet, and the large kernels of FastViT (github.com/DingXiaoH/RepLKNet-pytorch).


class LargeKernel(nn.Module):
    """RepLKNet; FastViT's forward computes the activation and drops it, which must stay so."""

    def __init__(
        self, c: int, large: int = 7, small: int = 3, discard: bool = False
    ) -> None:
        super().__init__()
        self.lkb_origin = conv_bn(c, c, large, 1, large // 2, c)
        self.small_conv = conv_bn(c, c, small, 1, small // 2, c)
        self.discard = discard
        self.activation = nn.GELU()

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
    sizes = ((5, 1), (3, 2), (3, 3))  # of kernels, with their dilation

    def __init__(self, c: int, k: int = 9) -> None:
        super().__init__()
        self.lk_origin = nn.Conv2d(c, c, k, 1, k // 2, groups=c, bias=False)
        self.origin_bn = nn.BatchNorm2d(c)
        for size, rate in self.sizes:
            padding = (rate * (size - 1) + 1) // 2
            conv = nn.Conv2d(c, c, size, 1, padding, rate, groups=c, bias=False)
            self.add_module(f"dil_conv_k{size}_{rate}", conv)
            self.add_module(f"dil_bn_k{size}_{rate}", nn.BatchNorm2d(c))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "origin_bn"):
            return self.lk_origin(x)
        out = self.origin_bn(self.lk_origin(x))
        for size, rate in self.sizes:
            parts = (
                getattr(self, f"dil_{kind}_k{size}_{rate}") for kind in ("conv", "bn")
            )
            out = out + nn.Sequential(*parts)(x)
        return out


# -- VanillaNet (github.com/huawei-noah/VanillaNet).


class VanillaActivation(nn.ReLU):
    def __init__(self, dim: int, act_num: int = 3) -> None:
        super().__init__()
        self.deploy = False
        self.dim = dim
        self.act_num = act_num
        self.weight = nn.Parameter(
            torch.randn(dim, 1, 2 * act_num + 1, 2 * act_num + 1)
        )
        self.bias = None
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        options = {"padding": self.act_num, "groups": self.dim}
        out = F.conv2d(super().forward(x), self.weight, self.bias, **options)
        return out if self.deploy else self.bn(out)


class VanillaBlock(nn.Module):
    def __init__(self, cin: int, cout: int, act_learn: int = 1) -> None:
        super().__init__()
        self.act_learn = act_learn
        self.deploy = False
        self.conv1 = nn.Sequential(
            nn.Conv2d(cin, cin, 1),
            nn.BatchNorm2d(cin),
        )
        self.conv2 = nn.Sequential(
            nn.Conv2d(cin, cout, 1),
            nn.BatchNorm2d(cout),
        )
        self.pool = nn.MaxPool2d(2)
        self.act = VanillaActivation(cout)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            self.conv(x)
            if self.deploy
            else self.conv2(F.leaky_relu(self.conv1(x), self.act_learn))
        )
        return self.act(self.pool(x))


class VanillaNet(nn.Module):
    def __init__(self, dims: tuple[int, ...] = (8, 12), classes: int = 5) -> None:
        super().__init__()
        first = dims[0]
        last = dims[-1]
        self.act_learn = 1.0
        self.deploy = False
        self.stem1 = nn.Sequential(
            nn.Conv2d(3, first, 4, stride=4), nn.BatchNorm2d(first)
        )
        self.stem2 = nn.Sequential(
            nn.Conv2d(first, first, 1), nn.BatchNorm2d(first), VanillaActivation(first)
        )
        self.stages = nn.ModuleList(VanillaBlock(*pair) for pair in pairwise(dims))
        head = (nn.Conv2d(last, classes, 1), nn.BatchNorm2d(classes))
        self.cls1 = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(0.1), *head)
        self.cls2 = nn.Sequential(nn.Conv2d(classes, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.cls(nn.Sequential(self.stem, *self.stages)(x)).flatten(1)
        x = self.stem2(F.leaky_relu(self.stem1(x), self.act_learn))
        x = nn.Sequential(*self.stages)(x)
        return self.cls2(F.leaky_relu(self.cls1(x), self.act_learn)).flatten(1)


CASES = {
    "dbb": Case(lambda: DBB(8, 8), "dbb", "dbb_reparam"),
    "dbb-groups": Case(lambda: DBB(8, 8, groups=4), "dbb", "dbb_reparam"),
    "dbb-depthwise": Case(lambda: DBB(8, 8, groups=8), "dbb", "dbb_reparam"),
    "dbb-stride": Case(lambda: DBB(8, 12, 5, stride=2, groups=2), "dbb", "dbb_reparam"),
    "acnet": Case(lambda: ACBlock(8, 12), "acnet", "fused_conv"),
    "acnet-crop": Case(
        lambda: ACBlock(8, 8, k=5, padding=0, groups=2), "acnet", "fused_conv"
    ),
    "acnet-wide": Case(
        lambda: ACBlock(8, 8, 3, 3, 2, affine=False), "acnet", "fused_conv"
    ),
    "replknet": Case(lambda: LargeKernel(8, 13, 5), "large-kernel", "lkb_reparam"),
    "fastvit-large-kernel": Case(
        lambda: LargeKernel(8, 7, 3, True), "large-kernel", "lkb_reparam"
    ),
    "unireplknet": Case(lambda: DilatedReparam(8), "unireplknet", "lk_origin"),
    "vanillanet-activation": Case(
        lambda: VanillaActivation(8), "vanillanet-activation", "weight"
    ),
    "vanillanet": Case(lambda: VanillaBlock(8, 12), "vanillanet-block", "conv"),
    "vanillanet-whole": Case(VanillaNet, "vanillanet", "stem", in_channels=3),
}
