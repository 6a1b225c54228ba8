"""Codes that are concatenated have one zero point, whatever passes moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr


class Dense(nn.Module):
    """Every layer reads the concatenation of all before it: some of them positive, some not."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(8 * (i + 1), 8, 3, padding=1) for i in range(3))
        self.pool = nn.MaxPool2d(3, 1, 1) if pool else nn.Identity()
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for number, layer in enumerate(self.layers):
            y = layer(torch.relu(torch.cat(found, 1)))
            found.append(torch.relu(self.pool(y)) if number % 2 else y)
        return self.last(torch.cat(found, 1))


@pytest.mark.parametrize("target", [None, "tensorrt", "onnxruntime", "openvino"])
@pytest.mark.parametrize("pool", [True, False])
def test_a_dense_block_agrees_with_its_simulation(target: str | None, pool: bool) -> None:
    torch.manual_seed(0)
    model, x = Dense(pool).eval(), torch.randn(2, 3, 12, 12)
    torchq.quantize_(model, target=target)
    torchq.calibrate(model, [x], progress=False)
    # Without an example: a comparison would refuse a wrong result. 40 dB is one code in hundreds
    # off by one.
    assert sqnr(torchq.deploy(model)(x), model(x)) > 40
