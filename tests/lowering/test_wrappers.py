"""Deployment of models in wrappers of torch, and of models with such parts."""

import pytest
import torch
from torch import nn

import torchq
from tests.lowering.common import calibrated
from tests.rank_processes import needs_gloo
from tests.wrappers import WRAPPERS, one_process
from torchq.lowering import Int8Layer

__all__ = ["one_process"]

pytestmark = [needs_gloo, pytest.mark.usefixtures("one_process")]


def network(x: torch.Tensor) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
    )
    model = calibrated(nn.Sequential(stem, nn.Flatten(), nn.Linear(288, 5)), x)
    assert isinstance(model, nn.Sequential)
    return model


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


@pytest.mark.sample(6)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_wrappers_are_left_out(wrapper: str, part: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    expected = torchq.deploy(network(x), x)
    model = network(x)
    wrapped: nn.Module = model
    if part:
        model[0] = WRAPPERS[wrapper](model[0])
    else:
        wrapped = WRAPPERS[wrapper](model)
    int8 = torchq.deploy(wrapped, x)
    assert kinds(int8) == kinds(expected)
    assert sum(isinstance(m, Int8Layer) for m in int8.modules()) == 2
    assert torch.equal(int8(x), expected(x))
