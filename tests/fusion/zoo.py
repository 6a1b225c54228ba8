"""Small blocks with the structure and attribute names of the RepVGG, YOLO and PP-YOLOE families, written for these tests."""

import torch
import torch.nn.functional as F
from torch import nn


def conv_bn(cin, cout, k, stride=1, padding=0, groups=1, bias=False, conv="conv", bn="bn"):
    block = nn.Sequential()
    block.add_module(conv, nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=bias))
    block.add_module(bn, nn.BatchNorm2d(cout))
    return block


class SE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.down, self.up = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class RepVGGBlock(nn.Module):
    def __init__(self, cin, cout, stride=1, groups=1, se=False, post_se=False):
        super().__init__()
        self.deploy, self.groups, self.in_channels = False, groups, cin
        self.nonlinearity = nn.ReLU()
        self.se = SE(cout) if se else nn.Identity()
        self.post_se = SE(cout) if post_se else nn.Identity()
        self.rbr_identity = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_dense = conv_bn(cin, cout, 3, stride, 1, groups)
        self.rbr_1x1 = conv_bn(cin, cout, 1, stride, 0, groups)
        self.id_tensor = torch.ones(1)  # upstream caches a plain tensor here

    def forward(self, x):
        if hasattr(self, "rbr_reparam"):
            return self.post_se(self.nonlinearity(self.se(self.rbr_reparam(x))))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.post_se(self.nonlinearity(self.se(self.rbr_dense(x) + self.rbr_1x1(x) + out)))


class CustomL2Block(RepVGGBlock):
    def forward(self, x, penalty):
        return super().forward(x), penalty


class Yolov7RepConv(nn.Module):
    def __init__(self, cin, cout, stride=1, groups=1):
        super().__init__()
        self.deploy, self.groups = False, groups
        self.act = nn.SiLU()
        self.rbr_identity = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_dense = nn.Sequential(
            nn.Conv2d(cin, cout, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(cout)
        )
        self.rbr_1x1 = nn.Sequential(
            nn.Conv2d(cin, cout, 1, stride, 0, groups=groups, bias=False), nn.BatchNorm2d(cout)
        )

    def forward(self, x):
        if hasattr(self, "rbr_reparam"):
            return self.act(self.rbr_reparam(x))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.act(self.rbr_dense(x) + self.rbr_1x1(x) + out)


class QARepVGG(nn.Module):
    """YOLOv6: plain 1x1 and identity branches, optionally an average pool, one BatchNorm after the sum."""

    def __init__(self, cin, cout, stride=1, groups=1, avg=False):
        super().__init__()
        self.nonlinearity, self.se = nn.ReLU(), nn.Identity()
        self.rbr_dense = conv_bn(cin, cout, 3, stride, 1, groups)
        self.rbr_1x1 = nn.Conv2d(cin, cout, 1, stride, groups=groups, bias=False)
        same = cin == cout and stride == 1
        self.rbr_identity = nn.Identity() if same else None
        self.rbr_avg = nn.AvgPool2d(3, stride, 1) if avg and same else None
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.bn(self.se(self.rbr_reparam(x))))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        avg = 0 if self.rbr_avg is None else self.rbr_avg(x)
        return self.nonlinearity(self.bn(self.se(self.rbr_dense(x) + self.rbr_1x1(x) + out + avg)))


class ScaleLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c))

    def forward(self, x):
        return x * self.weight.view(1, -1, 1, 1)


class LinearAddBlock(nn.Module):
    """YOLOv6 CSLA: no BatchNorm in the branches, and no deployed form upstream."""

    def __init__(self, c):
        super().__init__()
        self.conv, self.scale_conv = nn.Conv2d(c, c, 3, 1, 1, bias=False), ScaleLayer(c)
        self.conv_1x1, self.scale_1x1 = nn.Conv2d(c, c, 1, bias=False), ScaleLayer(c)
        self.scale_identity, self.bn, self.nonlinearity = (
            ScaleLayer(c),
            nn.BatchNorm2d(c),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.nonlinearity(
            self.bn(
                self.scale_conv(self.conv(x))
                + self.scale_1x1(self.conv_1x1(x))
                + self.scale_identity(x)
            )
        )


class PPYoloeBlock(nn.Module):
    def __init__(self, cin, cout, alpha=None, norm="bn"):
        super().__init__()
        self.conv1 = conv_bn(cin, cout, 3, 1, 1, bn=norm)
        self.conv2 = conv_bn(cin, cout, 1, 1, 0, bn=norm)
        self.act = nn.SiLU()
        self.alpha = None if alpha is None else nn.Parameter(torch.tensor([float(alpha)]))

    def forward(self, x):
        if hasattr(self, "conv"):
            return self.act(self.conv(x))
        if self.alpha is not None:
            return self.act(self.conv1(x) + self.alpha * self.conv2(x))
        return self.act(self.conv1(x) + self.conv2(x))


class TruthyAlphaBlock(PPYoloeBlock):
    """The upstream spelling, under which alpha == 0 means a coefficient of one; its forward is what counts."""

    def forward(self, x):
        if hasattr(self, "conv"):
            return self.act(self.conv(x))
        if self.alpha:
            return self.act(self.conv1(x) + self.alpha * self.conv2(x))
        return self.act(self.conv1(x) + self.conv2(x))


class UltraConv(nn.Module):
    def __init__(self, cin, cout, k, padding, stride=1, groups=1, act=False):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(cout)
        self.act = nn.SiLU() if act else nn.Identity()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class UltraRepConv(nn.Module):
    def __init__(self, cin, cout, stride=1, groups=1):
        super().__init__()
        self.bn = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.conv1 = UltraConv(cin, cout, 3, 1, stride, groups)
        self.conv2 = UltraConv(cin, cout, 1, 0, stride, groups)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.conv1(x) + self.conv2(x) + (0 if self.bn is None else self.bn(x)))

    def forward_fuse(self, x):
        return self.act(self.conv(x))


class UltraConv2(UltraConv):
    def __init__(self, cin, cout):
        super().__init__(cin, cout, 3, 1, act=True)
        self.cv2 = nn.Conv2d(cin, cout, 1, bias=False)

    def forward(self, x):
        return self.act(self.bn(self.conv(x) + self.cv2(x)))

    def forward_fuse(self, x):
        return self.act(self.bn(self.conv(x)))


class ImplicitA(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.implicit = nn.Parameter(torch.randn(1, c, 1, 1))

    def forward(self, x):
        return self.implicit + x


class ImplicitM(ImplicitA):
    def forward(self, x):
        return self.implicit * x


class ImplicitHead(nn.Module):
    def __init__(self, channels, out, bias=True):
        super().__init__()
        self.m = nn.ModuleList(nn.Conv2d(c, out, 1, bias=bias) for c in channels)
        self.ia = nn.ModuleList(ImplicitA(c) for c in channels)
        self.im = nn.ModuleList(ImplicitM(out) for _ in channels)

    def forward(self, xs):
        return [im(m(ia(x))) for m, ia, im, x in zip(self.m, self.ia, self.im, xs, strict=True)]


class SuperGradientsBlock(nn.Module):
    """Holds an unused rbr_reparam from the start; flags say what is fused."""

    def __init__(self, cin, cout, stride=1, groups=1):
        super().__init__()
        self.branch_3x3 = conv_bn(cin, cout, 3, stride, 1, groups)
        self.branch_1x1 = nn.Conv2d(cin, cout, 1, stride, groups=groups)
        self.identity = nn.Identity() if cin == cout and stride == 1 else None
        self.alpha = nn.Parameter(torch.tensor([0.7]))
        self.post_bn, self.nonlinearity, self.se = nn.BatchNorm2d(cout), nn.ReLU(), nn.Identity()
        self.register_buffer("id_tensor", torch.zeros(1))
        self.rbr_reparam = nn.Conv2d(cin, cout, 3, stride, 1, groups=groups)
        self.partially_fused = self.fully_fused = False

    def forward(self, x):
        if self.fully_fused:
            return self.se(self.nonlinearity(self.rbr_reparam(x)))
        out = 0 if self.identity is None else self.identity(x)
        return self.se(
            self.nonlinearity(
                self.post_bn(self.branch_3x3(x) + self.alpha * self.branch_1x1(x) + out)
            )
        )


class MMPretrainBlock(nn.Module):
    def __init__(self, cin, cout, stride=1, groups=1):
        super().__init__()
        self.deploy = False
        self.branch_3x3 = conv_bn(cin, cout, 3, stride, 1, groups, bn="norm")
        self.branch_1x1 = conv_bn(cin, cout, 1, stride, 0, groups, bn="norm")
        self.branch_norm = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.se_layer, self.act = SE(cout), nn.ReLU()

    def forward(self, x):
        if self.deploy:
            return self.act(self.se_layer(self.branch_reparam(x)))
        out = self.branch_3x3(x) + self.branch_1x1(x)
        out = out if self.branch_norm is None else out + self.branch_norm(x)
        return self.act(self.se_layer(out))
