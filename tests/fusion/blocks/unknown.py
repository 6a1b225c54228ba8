"""A block of no known family."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.case import Case


class PlainSum(nn.Module):
    """A block of no known family."""

    def __init__(self, cin: int, cout: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.wide = nn.Sequential(
            nn.Conv2d(cin, cout, 5, stride, 2, groups=groups, bias=False), nn.BatchNorm2d(cout)
        )
        self.slim = nn.Sequential(
            nn.Conv2d(cin, cout, (1, 3), stride, (0, 1), groups=groups), nn.BatchNorm2d(cout)
        )
        self.gate = nn.Parameter(torch.randn(1, cout, 1, 1))
        self.stride, self.after = stride, nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.wide(x) - self.gate * self.slim(x))


CASES = {
    "unknown": Case(lambda: PlainSum(8, 8), 8, "unknown block", "merged"),
    "unknown-stride-groups": Case(lambda: PlainSum(8, 12, 2, 4), 8, "unknown block", "merged"),
}
