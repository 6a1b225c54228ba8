"""The order of scale, bias and rounding: layers that read equal inputs give equal codes."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import BITS, Residual
from torchq.lowering import Int8Layer
from torchq.lowering.check import forced_pairs


class Gated(nn.Module):
    """A mobile block: pointwise, depthwise, squeeze and excitation, and a linear head with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.each = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.squeeze, self.narrow = nn.Conv2d(24, 24, 1), nn.Conv2d(24, 16, 1)
        self.wide, self.head = nn.Linear(16, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.hardswish(self.each(nn.functional.silu(self.widen(x))))
        x = x * self.squeeze(nn.functional.adaptive_avg_pool2d(x, 1)).sigmoid()
        x = self.narrow(x).flatten(2).transpose(1, 2)
        return self.head(nn.functional.gelu(self.wide(x)))


def share_off(model: nn.Module, simulated: nn.Module, x: Tensor) -> float:
    """The share of codes that differ by one when layers read equal inputs; infinite for more."""
    off = count = 0
    for _, got, want in forced_pairs(model, simulated, x):
        if got.dtype is torch.uint8:
            difference = (got.int() - want.int()).abs()
            if int(difference.max()) > 1:
                return float("inf")
            off, count = off + int(difference.sum()), count + got.numel()
        else:
            assert (got - want).norm() < 1e-4 * want.norm()
    return off / count


@pytest.mark.parametrize(("unsigned", "most"), [(False, 1e-5), ("auto", 2e-5)])
@pytest.mark.parametrize("network", [Residual, Gated])
def test_one_code_in_1e5_differs_by_one(
    network: type[nn.Module], unsigned: bool | str, most: float
) -> None:
    """Unsigned codes are twice as fine, so that twice as many values lie next to a tie."""
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(32, 3, 48, 48)
    if network is Residual:
        torchq.fuse_(model, x)
    torchq.quantize_(model, torchq.recipes.integer(BITS, 8, unsigned=unsigned), target="tensorrt")
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, target="torch")
    assert share_off(int8, model, x) <= most
    # The order matters: a bias that is a tenth of a code off is seen in the layer behind it.
    layers = [m for m in int8.modules() if isinstance(m, Int8Layer) and m.output_qparams]
    layers[0].bias = layers[0].bias + 0.1 * layers[0].output_qparams.scale
    assert share_off(int8, model, x) > 100 * most
