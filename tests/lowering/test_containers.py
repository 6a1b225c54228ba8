"""Models whose code does more with its parts than call them, and models that resist copying."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, sqnr


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 9, 9)


class Blocks(nn.Sequential):
    """A Sequential of a user's own class."""


class Taking(nn.Module):
    """Code that cannot be traced and takes its container apart in one of several ways."""

    def __init__(self, how: str, container: type[nn.Sequential]) -> None:
        super().__init__()
        self.how = how
        block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.layers = container(nn.Conv2d(3, 4, 3), nn.ReLU(), block)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        if self.how == "index":
            return self.layers[2](self.layers[1](self.layers[0](x)))
        if self.how == "slice":
            return self.layers[1:](self.layers[:1](x))
        if self.how == "length":
            assert len(self.layers) == 3
            return self.layers(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("container", [nn.Sequential, Blocks])
@pytest.mark.parametrize("how", ["index", "slice", "length", "loop"])
@pytest.mark.parametrize("compare", [False, True])
def test_a_container_that_its_parent_takes_apart_stays_a_container(
    images: Tensor, how: str, container: type[nn.Sequential], compare: bool
) -> None:
    model = calibrated(Taking(how, container), images)
    int8 = torchq.deploy(model, images if compare else None)
    assert sqnr(int8(images), model(images)) > 40
    assert type(int8.layers) is container
    assert isinstance(int8.layers[0], torchq.lowering.Int8Conv)


@pytest.mark.parametrize(
    "make", [lambda: math, threading.Lock, lambda: {"deep": [threading.Lock()]}]
)
@pytest.mark.parametrize("place", ["", "block", "block.0"])
def test_attributes_that_cannot_be_copied_are_shared(images: Tensor, make: Any, place: str) -> None:
    model = calibrated(Taking("loop", nn.Sequential), images)
    model.block = model.layers[2]
    model.get_submodule(place).library = library = make()
    int8 = torchq.deploy(model, images)
    assert sqnr(int8(images), model(images)) > 40
    assert model.get_submodule(place).library is library
    owner = int8.get_submodule(place)
    assert owner.library is library or isinstance(library, dict)


def test_a_class_that_refuses_to_be_copied_is_an_error(images: Tensor) -> None:
    class Unique(nn.Conv2d):
        def __deepcopy__(self, memo: dict[int, Any]) -> Unique:
            raise RuntimeError("there is only one\nof these")

    model = nn.Sequential(Unique(3, 3, 1), nn.Conv2d(3, 3, 1))
    calibrated(model, images)
    with pytest.raises(
        torchq.errors.ExportError,
        match=r"deploy: got a Sequential that cannot be copied \(there is only one\); expected one",
    ):
        torchq.deploy(model)
