"""UniRepLKNet (github.com/AILab-CVC/UniRepLKNet)."""

from __future__ import annotations

from torch import Tensor, nn

from tests.fusion.blocks.case import Case


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


CASES = {
    "unireplknet": Case(lambda: DilatedReparam(8), 8, "unireplknet", "lk_origin"),
}
