"""Parameters that a forward overwrites are put back, and no others are kept twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.utils import state_kept
from torchq.utils.written_parameters import written_parameters


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.fc = nn.Linear(8, 8)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x * self.scale)


class Method(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.scale.mul_(2)
        return super().forward(x)


class Element(Base):
    def forward(self, x: Tensor) -> Any:
        self.fc.weight.data[0] = 1
        return super().forward(x)


class Augmented(Base):
    def forward(self, x: Tensor) -> Any:
        self.scale.data += 1
        return super().forward(x)


class Function(Base):
    def forward(self, x: Tensor) -> Any:
        nn.init.ones_(self.fc.weight)
        return super().forward(x)


class Out(Base):
    @torch.no_grad()
    def normalise(self) -> None:
        torch.div(self.fc.weight, self.fc.weight.norm(), out=self.fc.weight)

    def forward(self, x: Tensor) -> Any:
        self.normalise()
        return super().forward(x)


class Alias(Base):
    def forward(self, x: Tensor) -> Any:
        rows = self.fc.weight.detach().view(-1)
        rows.clamp_(-0.1, 0.1)
        return super().forward(x)


class Loop(Base):
    def forward(self, x: Tensor) -> Any:
        for _, parameter in self.fc.named_parameters():
            parameter.data.sub_(0.1)
        return super().forward(x)


def cached(function: Any) -> Any:
    inside = functools.lru_cache(maxsize=1)(function)

    @functools.wraps(inside)
    def call(*args: Any) -> Any:
        return inside(*args)

    return call


class Inherited(Method):
    @cached
    def table(self, size: int) -> Tensor:
        return torch.zeros(size)


class Layers(Base):
    """Holds layers and numbers in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.factors = nn.ParameterList([torch.ones(8)])


class LoopOfLayers(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            layer.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Place(Layers):
    def forward(self, x: Tensor) -> Any:
        self.layers[0].bias.data.mul_(2)
        return super().forward(x)


class ListOfNumbers(Layers):
    def forward(self, x: Tensor) -> Any:
        self.factors[0].data.mul_(2)
        return super().forward(x)


class Modules(Layers):
    def forward(self, x: Tensor) -> Any:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.mul_(2)
        return super().forward(x)


class Comprehension(Base):
    def forward(self, x: Tensor) -> Any:
        [parameter.data.mul_(2) for parameter in self.parameters()]
        return super().forward(x)


class Table(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.table(torch.arange(2)))


WRITING = [Method, Element, Augmented, Function, Out, Alias, Loop, Inherited]
WRITING += [LoopOfLayers, Place, ListOfNumbers, Modules, Comprehension, Table]


@torch.no_grad()
@pytest.mark.parametrize("make", WRITING)
def test_the_numbers_of_parameters_are_put_back(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with state_kept(model):
        model(torch.ones(2, 8))
        after = model.state_dict()
        assert any(
            not torch.equal(after[name], value) for name, value in before.items()
        )
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.filterwarnings("ignore:.*of the multiply-adds quantized:UserWarning")
def test_calibration_leaves_parameters_that_a_forward_overwrites() -> None:
    model = Method().eval()
    before = model.scale.detach().clone()
    torchq.quantize_(model, example=torch.ones(2, 8), progress=False)
    torchq.calibrate(model, [torch.rand(4, 8), torch.rand(4, 8)], progress=False)
    assert torch.equal(model.scale, before)


class Residual(Base):
    def forward(self, x: Tensor) -> Any:
        self.fc.requires_grad_(False)
        y = self.fc(x).relu_()
        y += x
        y[0] = self.scale
        return y.mul_(self.scale)


def test_parameters_that_are_only_read_are_not_kept_twice() -> None:
    model = nn.Sequential(
        Base(), Residual(), nn.Linear(8, 8), nn.MultiheadAttention(8, 2)
    )
    assert written_parameters(model) == []


def test_only_what_is_written_is_kept_twice() -> None:
    model = Method()
    assert [id(p) for p in written_parameters(model)] == [id(model.scale)]
