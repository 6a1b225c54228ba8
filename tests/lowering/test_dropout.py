"""Functions that do nothing outside training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import calibrated


def stochastic_depth(input: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    return input * torch.bernoulli(torch.tensor(1 - p)) if training else input


fx.wrap("stochastic_depth")


class Dropping(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.active = training

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.active)
        return self.last(
            stochastic_depth(F.dropout2d(x, training=self.active), 0.5, "row", self.active)
        )


@pytest.mark.parametrize("training", [False, True])
def test_functions_that_drop_nothing_do_not_part_layers(training: bool) -> None:
    int8 = torchq.deploy(calibrated(Dropping(training), torch.randn(2, 3, 9, 9)))
    assert isinstance(int8, fx.GraphModule)
    assert (int8.get_submodule("first").output_qparams is None) == training
    assert sum("drop" in str(node.target) for node in int8.graph.nodes) == 2 * training
