"""YOLO-NAS of super-gradients (github.com/Deci-AI/super-gradients)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case
from tests.fusion.blocks.layers import conv_bn


class SuperGradientsBlock(nn.Module):
    """Holds an unused rbr_reparam from the start; flags say what is fused."""

    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.branch_3x3 = conv_bn(cin, cout, 3, stride, 1, groups)
        self.branch_1x1 = nn.Conv2d(cin, cout, 1, stride, groups=groups)
        self.identity = nn.Identity() if cin == cout and stride == 1 else None
        self.alpha = nn.Parameter(torch.tensor([0.7]))
        self.post_bn, self.nonlinearity, self.se = nn.BatchNorm2d(cout), nn.ReLU(), nn.Identity()
        self.register_buffer("id_tensor", torch.zeros(1))
        self.rbr_reparam = nn.Conv2d(cin, cout, 3, stride, 1, groups=groups)
        self.partially_fused = self.fully_fused = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fully_fused:
            return self.se(self.nonlinearity(self.rbr_reparam(x)))
        out = 0 if self.identity is None else self.identity(x)
        return self.se(
            self.nonlinearity(
                self.post_bn(self.branch_3x3(x) + self.alpha * self.branch_1x1(x) + out)
            )
        )


CASES = {
    "super-gradients": Case(
        lambda: SuperGradientsBlock(8, 8), 8, "super-gradients-qarepvgg", "rbr_reparam"
    ),
    "super-gradients-stride": Case(
        lambda: SuperGradientsBlock(8, 12, 2, 2), 8, "super-gradients-qarepvgg", "rbr_reparam"
    ),
}
