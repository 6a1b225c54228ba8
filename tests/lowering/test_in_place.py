"""What a forward overwrites or keeps, it overwrites and keeps after deployment too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import recipe

X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(8, 4, 3)
        self.act = nn.Hardswish(inplace=True)
        self.register_buffer("state", torch.zeros(4, 8, 6, 6))

    def change(self, y: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(self.change(y))


class Method(Base):
    def change(self, y: Tensor) -> Tensor:
        y.mul_(3)
        F.relu_(y)
        return y


class Module(Base):
    def change(self, y: Tensor) -> Tensor:
        self.act(y)
        return y


class Assigned(Base):
    def change(self, y: Tensor) -> Tensor:
        kept = y
        y *= 3
        y += 1
        return kept


class Slice(Base):
    def change(self, y: Tensor) -> Tensor:
        y[:, :4].mul_(3)
        return y


class Out(Base):
    def change(self, y: Tensor) -> Tensor:
        z = torch.empty_like(y)
        torch.add(y, y, out=z)
        return z


class State(Base):
    def change(self, y: Tensor) -> Tensor:
        self.state.mul_(0.5).add_(y)
        return self.state + y


class Stored(Base):
    def change(self, y: Tensor) -> Tensor:
        y = y + self.state
        self.state = y.detach()
        return y


class Reset(Base):
    def change(self, y: Tensor) -> Tensor:
        y = y + self.state
        self.state.add_(1)
        if not self.training:
            self.state.zero_()
        return y


@pytest.mark.parametrize(
    "cls", [Method, Module, Assigned, Slice, Out, State, Stored, Reset]
)
def test_deployed_forwards_overwrite_and_keep_what_the_simulation_does(
    cls: type[Base],
) -> None:
    torch.manual_seed(0)
    model = cls().eval()
    torchq.quantize_(model, recipe(), progress=False)
    with torch.no_grad():
        torchq.calibrate(model, [X], progress=False)
        model.state = torch.ones(4, 8, 6, 6)
        deployed = torchq.deploy(model, target="torch", progress=False)
        for _ in range(2):  # the second call reads the state that the first one leaves
            # Kernels round their sums once, the simulation rounds each product.
            torch.testing.assert_close(
                deployed(X.clone()), model(X.clone()), rtol=1e-4, atol=1e-4
            )


class Block(nn.Module):
    """A residual block of torchvision, whose activations work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.relu(self.first(x)))
        y += x
        return self.relu(y)


def test_codes_are_handed_on_behind_activations_in_place() -> None:
    model = nn.Sequential(Block(), Block()).eval()
    torchq.quantize_(model, recipe(), progress=False)
    torchq.calibrate(model, [X], progress=False)
    deployed = torchq.deploy(model, X, progress=False)
    for number in "01":
        layer: Any = deployed.get_submodule(f"{number}.first")
        assert layer.output_qparams is not None
