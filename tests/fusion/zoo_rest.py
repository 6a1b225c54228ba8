"""Small blocks with the structure and attribute names of DBB, ACNet, UniRepLKNet, VanillaNet, RepViT and LeViT, written for these tests."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.fusion.zoo import conv_bn


class BNAndPad(nn.Module):
    """Pads with what the BatchNorm gives for zero: item assignment, so torch.fx cannot follow it."""

    def __init__(self, pad, c):
        super().__init__()
        self.bn, self.pad_pixels = nn.BatchNorm2d(c), pad

    def forward(self, x):
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
    def __init__(self, c, groups):
        super().__init__()
        self.conv, self.groups = nn.Conv2d(c, c, 1, groups=groups, bias=False), groups
        self.id_tensor = torch.zeros(c, c // groups, 1, 1)
        self.id_tensor[torch.arange(c), torch.arange(c) % (c // groups)] = 1.0

    def forward(self, x):
        return F.conv2d(x, self.conv.weight + self.id_tensor.to(x), groups=self.groups)


class DBB(nn.Module):
    def __init__(self, cin, cout, k=3, stride=1, groups=1):
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

    def forward(self, x):
        if hasattr(self, "dbb_reparam"):
            return self.nonlinear(self.dbb_reparam(x))
        out = self.dbb_origin(x)
        if hasattr(self, "dbb_1x1"):
            out = out + self.dbb_1x1(x)
        return self.nonlinear(out + self.dbb_avg(x) + self.dbb_1x1_kxk(x))


class ACBlock(nn.Module):
    def __init__(self, cin, cout, k=3, padding=1, stride=1, groups=1, affine=True):
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

    def forward(self, x):
        if self.deploy:
            return self.fused_conv(x)
        ver = x if self.crop == 0 else x[:, :, :, self.crop : -self.crop]
        hor = x if self.crop == 0 else x[:, :, self.crop : -self.crop, :]
        return (
            self.square_bn(self.square_conv(x))
            + self.ver_bn(self.ver_conv(ver))
            + self.hor_bn(self.hor_conv(hor))
        )


class DilatedReparam(nn.Module):
    def __init__(self, c, k=9, kernel_sizes=(5, 3, 3), dilates=(1, 2, 3)):
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

    def forward(self, x):
        if not hasattr(self, "origin_bn"):
            return self.lk_origin(x)
        out = self.origin_bn(self.lk_origin(x))
        for size, rate in zip(self.kernel_sizes, self.dilates, strict=True):
            out = out + getattr(self, f"dil_bn_k{size}_{rate}")(
                getattr(self, f"dil_conv_k{size}_{rate}")(x)
            )
        return out


class VanillaActivation(nn.ReLU):
    def __init__(self, dim, act_num=3):
        super().__init__()
        self.deploy, self.dim, self.act_num = False, dim, act_num
        self.weight = nn.Parameter(torch.randn(dim, 1, 2 * act_num + 1, 2 * act_num + 1))
        self.bias, self.bn = None, nn.BatchNorm2d(dim)

    def forward(self, x):
        out = F.conv2d(
            super().forward(x), self.weight, self.bias, padding=self.act_num, groups=self.dim
        )
        return out if self.deploy else self.bn(out)


class VanillaBlock(nn.Module):
    def __init__(self, cin, cout, act_learn=1):
        super().__init__()
        self.act_learn, self.deploy = act_learn, False
        self.conv1 = nn.Sequential(nn.Conv2d(cin, cin, 1), nn.BatchNorm2d(cin))
        self.conv2 = nn.Sequential(nn.Conv2d(cin, cout, 1), nn.BatchNorm2d(cout))
        self.pool, self.act = nn.MaxPool2d(2), VanillaActivation(cout)

    def forward(self, x):
        x = self.conv(x) if self.deploy else self.conv2(F.leaky_relu(self.conv1(x), self.act_learn))
        return self.act(self.pool(x))


class RepVGGDW(nn.Module):
    """RepViT: its fuse() returns a convolution that takes the block's place."""

    def __init__(self, c):
        super().__init__()
        self.conv, self.conv1 = conv_bn(c, c, 3, 1, 1, c, conv="c"), nn.Conv2d(c, c, 1, groups=c)
        self.bn = nn.BatchNorm2d(c)

    def forward(self, x):
        return self.bn((self.conv(x) + self.conv1(x)) + x)


class Residual(nn.Module):
    def __init__(self, m, drop=0.0):
        super().__init__()
        self.m, self.drop = m, drop

    def forward(self, x):
        if self.training and self.drop > 0:
            return x + self.m(x) * torch.rand(x.size(0), 1, 1, 1)
        return x + self.m(x)


class BNLinear(nn.Sequential):
    def __init__(self, a, b):
        super().__init__()
        self.add_module("bn", nn.BatchNorm1d(a))
        self.add_module("l", nn.Linear(a, b))


class Classifier(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.classifier, self.classifier_dist = BNLinear(dim, classes), BNLinear(dim, classes)

    def forward(self, x):
        return (self.classifier(x) + self.classifier_dist(x)) / 2


class LinearNorm(nn.Module):
    """LeViT: BatchNorm over the features of tokens, through a flatten."""

    def __init__(self, a, b):
        super().__init__()
        self.linear, self.bn = nn.Linear(a, b, bias=False), nn.BatchNorm1d(b)

    def forward(self, x):
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape_as(x)


class PlainSum(nn.Module):
    """A block of no known family."""

    def __init__(self, cin, cout, stride=1, groups=1):
        super().__init__()
        self.wide = nn.Sequential(
            nn.Conv2d(cin, cout, 5, stride, 2, groups=groups, bias=False), nn.BatchNorm2d(cout)
        )
        self.slim = nn.Sequential(
            nn.Conv2d(cin, cout, (1, 3), stride, (0, 1), groups=groups), nn.BatchNorm2d(cout)
        )
        self.gate = nn.Parameter(torch.randn(1, cout, 1, 1))
        self.stride, self.after = stride, nn.Hardswish()

    def forward(self, x):
        return self.after(self.wide(x) - self.gate * self.slim(x))
