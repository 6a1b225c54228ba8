"""RepVGG and its relatives in YOLO, PP-YOLOE, Ultralytics, mmpretrain and super-gradients."""

import torch
from torch import Tensor, nn

from tests.fusion.blocks.layers import SE, Case, conv_bn

# -- RepVGG, RepVGGplus (github.com/DingXiaoH/RepVGG).


class RepVGGBlock(nn.Module):
    def __init__(
        self, cin: int, cout: int, stride: int = 1, groups: int = 1, se: str = ""
    ) -> None:
        super().__init__()
        self.deploy = False
        self.groups = groups
        self.in_channels = cin
        self.nonlinearity = nn.ReLU()
        self.se, self.post_se = (
            SE(cout) if se == s else nn.Identity() for s in ("in", "post")
        )
        self.rbr_identity = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_dense = conv_bn(cin, cout, 3, stride, 1, groups)
        self.rbr_1x1 = conv_bn(cin, cout, 1, stride, 0, groups)
        self.id_tensor = torch.ones(1)  # upstream caches a plain tensor here

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.post_se(self.nonlinearity(self.se(self.rbr_reparam(x))))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.post_se(
            self.nonlinearity(self.se(self.rbr_dense(x) + self.rbr_1x1(x) + out))
        )


class CustomL2Block(RepVGGBlock):
    def forward(self, x: Tensor, penalty: float) -> tuple[Tensor, float]:
        return super().forward(x), penalty


# -- YOLOv6: QARepVGG and CSLA blocks (github.com/meituan/YOLOv6).


class QARepVGG(nn.Module):
    """Plain 1x1, identity and (v2) average pool branches, and one BatchNorm behind the addition."""

    def __init__(
        self, cin: int, cout: int, stride: int = 1, groups: int = 1, avg: bool = False
    ) -> None:
        super().__init__()
        self.nonlinearity = nn.ReLU()
        self.se = nn.Identity()
        self.rbr_dense = conv_bn(cin, cout, 3, stride, 1, groups)
        self.rbr_1x1 = nn.Conv2d(cin, cout, 1, stride, groups=groups, bias=False)
        same = cin == cout and stride == 1
        self.rbr_identity = nn.Identity() if same else None
        self.rbr_avg = nn.AvgPool2d(3, stride, 1) if avg and same else None
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.bn(self.se(self.rbr_reparam(x))))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        avg = 0 if self.rbr_avg is None else self.rbr_avg(x)
        return self.nonlinearity(
            self.bn(self.se(self.rbr_dense(x) + self.rbr_1x1(x) + out + avg))
        )


class ScaleLayer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(1, -1, 1, 1)


class LinearAddBlock(nn.Module):
    """YOLOv6 CSLA: no BatchNorm in the branches, and no deployed form upstream."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, 1, 1, bias=False)
        self.scale_conv = ScaleLayer(c)
        self.conv_1x1 = nn.Conv2d(c, c, 1, bias=False)
        self.scale_1x1 = ScaleLayer(c)
        self.scale_identity = ScaleLayer(c)
        self.bn = nn.BatchNorm2d(c)
        self.nonlinearity = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.scale_conv(self.conv(x)) + self.scale_1x1(self.conv_1x1(x))
        return self.nonlinearity(self.bn(out + self.scale_identity(x)))


# -- YOLOv7: RepConv and heads with implicit knowledge (github.com/WongKinYiu/yolov7).


class Yolov7RepConv(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.deploy = False
        self.groups = groups
        self.act = nn.SiLU()
        self.rbr_identity = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.rbr_dense = nn.Sequential(*conv_bn(cin, cout, 3, stride, 1, groups))
        self.rbr_1x1 = nn.Sequential(*conv_bn(cin, cout, 1, stride, 0, groups))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.act(self.rbr_reparam(x))
        out = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.act(self.rbr_dense(x) + self.rbr_1x1(x) + out)


class ImplicitA(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.implicit = nn.Parameter(torch.randn(1, c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.implicit + x


class ImplicitM(ImplicitA):
    def forward(self, x: Tensor) -> Tensor:
        return self.implicit * x


class ImplicitHead(nn.Module):
    def __init__(self, channels: tuple[int, ...], out: int, bias: bool = True) -> None:
        super().__init__()
        self.m = nn.ModuleList(nn.Conv2d(c, out, 1, bias=bias) for c in channels)
        self.ia = nn.ModuleList(ImplicitA(c) for c in channels)
        self.im = nn.ModuleList(ImplicitM(out) for _ in channels)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [
            im(m(ia(x)))
            for m, ia, im, x in zip(self.m, self.ia, self.im, xs, strict=True)
        ]


# -- YOLOv10: RepVGGDW (github.com/THU-MIG/yolov10, github.com/ultralytics/ultralytics).


class RepVGGDW(nn.Module):
    """A 7x7 and a 3x3 depthwise convolution, each with BatchNorm, then an activation."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = UltraConv(c, c, 7, 3, groups=c)
        self.conv1 = UltraConv(c, c, 3, 1, groups=c)
        self.dim = c
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x) + self.conv1(x))

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


# -- Ultralytics (github.com/ultralytics/ultralytics).


class UltraConv(nn.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        k: int,
        padding: int,
        stride: int = 1,
        groups: int = 1,
        act: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, k, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(cout)
        self.act = nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class UltraRepConv(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.conv1 = UltraConv(cin, cout, 3, 1, stride, groups)
        self.conv2 = UltraConv(cin, cout, 1, 0, stride, groups)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(
            self.conv1(x) + self.conv2(x) + (0 if self.bn is None else self.bn(x))
        )

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class UltraConv2(UltraConv):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__(cin, cout, 3, 1, act=True)
        self.cv2 = nn.Conv2d(cin, cout, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x) + self.cv2(x)))

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


# -- PP-YOLOE and RT-DETR (github.com/PaddlePaddle/PaddleDetection, github.com/lyuwenyu/RT-DETR).


class PPYoloeBlock(nn.Module):
    def __init__(
        self, cin: int, cout: int, alpha: float | None = None, norm: str = "bn"
    ) -> None:
        super().__init__()
        self.conv1 = conv_bn(cin, cout, 3, 1, 1, bn=norm)
        self.conv2 = conv_bn(cin, cout, 1, 1, 0, bn=norm)
        self.act = nn.SiLU()
        self.alpha = (
            None if alpha is None else nn.Parameter(torch.tensor([float(alpha)]))
        )

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "conv"):
            return self.act(self.conv(x))
        two = self.conv2(x)
        return self.act(
            self.conv1(x) + (self.alpha * two if self.is_weighted() else two)
        )

    def is_weighted(self) -> bool:
        return self.alpha is not None


class TruthyAlphaBlock(PPYoloeBlock):
    """The upstream spelling, under which alpha == 0 means a coefficient of one."""

    def is_weighted(self) -> bool:
        return bool(self.alpha)


# -- RepVGG and MobileOne of mmpretrain (github.com/open-mmlab/mmpretrain).


class MMPretrainBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.deploy = False
        self.branch_3x3 = conv_bn(cin, cout, 3, stride, 1, groups, bn="norm")
        self.branch_1x1 = conv_bn(cin, cout, 1, stride, 0, groups, bn="norm")
        self.branch_norm = nn.BatchNorm2d(cin) if cin == cout and stride == 1 else None
        self.se_layer = SE(cout)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.act(self.se_layer(self.branch_reparam(x)))
        out = self.branch_3x3(x) + self.branch_1x1(x)
        out = out if self.branch_norm is None else out + self.branch_norm(x)
        return self.act(self.se_layer(out))


class MMMobileOne(nn.Module):
    def __init__(self, cin: int, cout: int, groups: int = 1) -> None:
        super().__init__()
        self.deploy = False
        branches = (conv_bn(cin, cout, 3, 1, 1, groups, bn="norm") for _ in range(3))
        self.branch_conv_list = nn.ModuleList(branches)
        self.branch_scale = conv_bn(cin, cout, 1, groups=groups, bn="norm")
        self.branch_norm = nn.BatchNorm2d(cin)
        self.se_layer = nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy:
            return self.act(self.se_layer(self.branch_reparam(x)))
        out = sum(branch(x) for branch in self.branch_conv_list)
        out = out + self.branch_scale(x) + self.branch_norm(x)
        return self.act(self.se_layer(out))


# -- YOLO-NAS of super-gradients (github.com/Deci-AI/super-gradients).


class SuperGradientsBlock(nn.Module):
    """Holds an unused rbr_reparam from the start; flags say what is fused."""

    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.branch_3x3 = conv_bn(cin, cout, 3, stride, 1, groups)
        self.branch_1x1 = nn.Conv2d(cin, cout, 1, stride, groups=groups)
        self.identity = nn.Identity() if cin == cout and stride == 1 else None
        self.alpha = nn.Parameter(torch.tensor([0.7]))
        self.post_bn = nn.BatchNorm2d(cout)
        self.nonlinearity = nn.ReLU()
        self.se = nn.Identity()
        self.register_buffer("id_tensor", torch.zeros(1))
        self.rbr_reparam = nn.Conv2d(cin, cout, 3, stride, 1, groups=groups)
        self.partially_fused = self.fully_fused = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fully_fused:
            return self.se(self.nonlinearity(self.rbr_reparam(x)))
        out = self.branch_3x3(x) + self.alpha * self.branch_1x1(x)
        out = out if self.identity is None else out + self.identity(x)
        return self.se(self.nonlinearity(self.post_bn(out)))


RBR = "rbr_reparam"
BRANCH = "branch_reparam"
YOLO_NAS = "super-gradients-qarepvgg"
CASES = {
    "repvgg": Case(lambda: RepVGGBlock(8, 8), "repvgg", RBR),
    "repvgg-stride": Case(lambda: RepVGGBlock(8, 12, stride=2), "repvgg", RBR),
    "repvgg-groups": Case(lambda: RepVGGBlock(8, 8, groups=4), "repvgg", RBR),
    "repvgg-depthwise": Case(lambda: RepVGGBlock(8, 8, groups=8), "repvgg", RBR),
    "repvgg-se": Case(lambda: RepVGGBlock(8, 8, se="in"), "repvgg", RBR),
    "repvggplus": Case(lambda: RepVGGBlock(8, 8, se="post"), "repvgg", RBR),
    "qarepvgg": Case(lambda: QARepVGG(8, 8), "qarepvgg", RBR),
    "qarepvgg-stride": Case(lambda: QARepVGG(8, 16, stride=2), "qarepvgg", RBR),
    "qarepvgg-v2": Case(lambda: QARepVGG(8, 8, groups=2, avg=True), "qarepvgg", RBR),
    "csla": Case(lambda: LinearAddBlock(8), "yolov6-linear-add", None),
    "yolov7": Case(lambda: Yolov7RepConv(8, 8), "repvgg", RBR),
    "yolov7-groups": Case(lambda: Yolov7RepConv(8, 8, groups=2), "repvgg", RBR),
    "yolov7-depthwise": Case(lambda: Yolov7RepConv(8, 8, groups=8), "repvgg", RBR),
    "ultralytics-repvggdw": Case(lambda: RepVGGDW(8), "ultralytics-repvggdw", "conv"),
    "ultralytics-repconv": Case(
        lambda: UltraRepConv(8, 8), "ultralytics-repconv", "conv"
    ),
    "ultralytics-stride": Case(
        lambda: UltraRepConv(8, 8, 2, 2), "ultralytics-repconv", "conv"
    ),
    "ultralytics-conv2": Case(lambda: UltraConv2(8, 12), "ultralytics-conv2", "conv"),
    "ppyoloe": Case(lambda: PPYoloeBlock(8, 12), "ppyoloe", "conv"),
    "ppyoloe-alpha": Case(lambda: PPYoloeBlock(8, 8, alpha=-0.3), "ppyoloe", "conv"),
    "ppyoloe-alpha-zero": Case(lambda: PPYoloeBlock(8, 8, alpha=0), "ppyoloe", "conv"),
    "ppyoloe-truthy-alpha-zero": Case(
        lambda: TruthyAlphaBlock(8, 8, alpha=0), "ppyoloe", "conv"
    ),
    "rtdetr": Case(lambda: PPYoloeBlock(8, 8, norm="norm"), "ppyoloe", "conv"),
    "mmpretrain": Case(
        lambda: MMPretrainBlock(8, 8, groups=2), "mmpretrain-repvgg", BRANCH
    ),
    "mmpretrain-stride": Case(
        lambda: MMPretrainBlock(8, 12, 2), "mmpretrain-repvgg", BRANCH
    ),
    "mmpretrain-mobileone": Case(
        lambda: MMMobileOne(8, 8, 8), "mmpretrain-mobileone", BRANCH
    ),
    "super-gradients": Case(lambda: SuperGradientsBlock(8, 8), YOLO_NAS, RBR),
    "super-gradients-stride": Case(
        lambda: SuperGradientsBlock(8, 12, 2, 2), YOLO_NAS, RBR
    ),
}
