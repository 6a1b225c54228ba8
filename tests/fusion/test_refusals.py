"""What must not be folded is refused by name and with its reason, and left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.blocks.layers import BatchNormAct
from tests.fusion.common import Net, data_dependent, error, outputs, randomized
from torchq.errors import FuseError
from torchq.fusion import fuse_


def two_consumers(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return m.bn(y) + y.relu()


def graph_output(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return m.bn(y), y


def shared_norm(m: Any, x: Tensor) -> Any:
    return m.bn(m.conv(x)) + m.bn(m.other(x))


def shared_conv(m: Any, x: Tensor) -> Any:
    return m.bn(m.conv(x)) + m.conv(x + 1)


def changed_in_place(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y += 1
    return m.bn(y)


def not_a_layer(m: Any, x: Tensor) -> Any:
    return m.bn(torch.relu(m.conv(x)))


def weight_read(m: Any, x: Tensor) -> Any:
    return m.bn(m.conv(x)) + m.conv.weight.abs().mean()


def without_bias(m: Any, x: Tensor) -> Any:
    return m.bn(F.conv2d(x, m.conv.weight, padding=1))


def foreign_bias(m: Any, x: Tensor) -> Any:
    return m.bn(F.conv2d(x, m.conv.weight, bias=m.other.bias))


def own_padding(m: Any, x: Tensor) -> Any:
    return F.conv2d(m.bn(x), m.other.weight, m.other.bias, padding=1)


def shift_read(m: Any, x: Tensor) -> Any:
    return m.bn(m.conv(x)) - m.bn.bias.sum()


def unused(m: Any, x: Tensor) -> Any:
    return m.conv(x)


FORWARDS = {
    "two consumers": (two_consumers, "conv has 2 consumers: bn, relu"),
    "graph output": (graph_output, "conv is also an output of the model"),
    "shared norm": (shared_norm, "is shared: it follows conv, other"),
    "shared conv": (
        shared_conv,
        "its layer conv is shared: it is also called without this BatchNorm",
    ),
    "in place": (changed_in_place, "conv has 2 consumers|its input comes from"),
    "not a layer": (
        not_a_layer,
        "its input comes from relu, not from a convolution or linear layer",
    ),
    "weight read": (
        weight_read,
        "its layer conv has parameters that are also read outside its own forward",
    ),
    "function without bias": (
        without_bias,
        "its input comes from conv2d, not from a convolution or linear layer",
    ),
    "function with a foreign bias": (
        foreign_bias,
        "its input comes from conv2d, not from a convolution or linear layer",
    ),
    "function with its own padding": (
        own_padding,
        "is called as a function, perhaps with another padding than its own|its input comes from x",
    ),
    "shift read": (shift_read, "has parameters that are also read outside its own forward"),
    "unused": (
        unused,
        "is not called in the traced or recorded forward; give an example that reaches it",
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_use_of_the_output_is_respected(name: str, traceable: bool) -> None:
    forward, reason = FORWARDS[name]
    model = randomized(Net(forward if traceable else data_dependent(forward)).double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want, state = outputs(model, x), copy.deepcopy(model.state_dict())
    report = fuse_(model, x)
    assert report.fused == ()
    assert any(part in report.reason("bn") for part in reason.split("|"))
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert error(outputs(model, x), want) == 0
    with pytest.raises(FuseError, match="bn: "):
        report.require_all()


def test_even_the_type_of_a_batchnorm_is_not_there_without_it() -> None:
    model = randomized(Net(lambda m, x: m.bn(m.conv(x.to(m.bn.weight.dtype)))))
    assert "has parameters that are also read outside its own forward" in fuse_(model).reason("bn")


class Before(nn.Module):
    """A BatchNorm in front of a layer."""

    def __init__(self, layer: Any, norm: Any = None, output: bool = False) -> None:
        super().__init__()
        self.norm, self.layer, self.output = norm or nn.BatchNorm2d(4), layer, output

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        return (self.layer(x), x) if self.output else self.layer(x)


BEFORE = {
    "transposed": (
        lambda: Before(nn.ConvTranspose2d(4, 6, 3)),
        "layer after it is transposed: how many taps overlap varies",
    ),
    "also an output": (
        lambda: Before(nn.Conv2d(4, 6, 1), output=True),
        "its input comes from x, not from a convolution",
    ),
    "with an activation": (
        lambda: Before(nn.Conv2d(4, 6, 1), BatchNormAct(4)),
        "its input comes from x, not from a convolution",
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_does_not_pass_through_the_layer_behind(name: str) -> None:
    make, reason = BEFORE[name]
    model = randomized(make().double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert reason in fuse_(model).reason("norm")
    assert error(outputs(model, x), want) == 0
