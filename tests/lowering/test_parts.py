"""Parts of models: split, concatenated and quantized tensors, parts that are more than called."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, recipe, sqnr
from tests.models import simulated
from torchq.lowering.codes import Dequantize, Quantize

SPLITS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunk method": lambda x: x.chunk(2, dim=1),
    "chunk": lambda x: torch.chunk(x, 2, 1),
    "split method": lambda x: x.split([8, 8], 1),
    "split": lambda x: torch.split(x, 8, dim=1),
    "unbind": lambda x: x.reshape(x.shape[0], 2, 8, *x.shape[2:]).unbind(1),
    "slices": lambda x: (x[:, :8], x[:, 8:]),
}


class Shuffle(nn.Module):
    """A unit of ShuffleNet: half of the channels goes through a convolution, then all are mixed."""

    def __init__(self, split: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.split = split
        self.stem = nn.Conv2d(3, 16, 3)
        self.branch = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.split(self.stem(x))
        x = torch.cat((left, self.branch(right)), dim=1)
        count, channels, height, width = x.size()
        x = (
            x.view(count, 2, channels // 2, height, width)
            .transpose(1, 2)
            .contiguous()
            .view(count, -1, height, width)
        )
        return self.last(x)


@pytest.mark.parametrize("split", SPLITS)
def test_parts_and_shuffles_stay_codes(split: str) -> None:
    model = Shuffle(SPLITS[split]).eval()
    x = torch.randn(2, 3, 9, 9)
    simulated(model, [x], recipe(), target="tensorrt")
    int8 = torchq.deploy(model, x)
    # Ties that float32 rounds otherwise are one scale of 1/127 of a range, in few places.
    assert sqnr(int8(x), model(x)) > 40
    # Quantized are the image, and the result of the stem once for each reader; nothing else is
    # floating point.
    assert sum(isinstance(m, Quantize) for m in int8.modules()) <= 3
    assert not any(isinstance(m, Dequantize) for m in int8.modules())
    smaller = x[:1, :, :7]
    assert sqnr(int8(smaller), model(smaller)) > 40


class Dense(nn.Module):
    """Every layer reads the concatenation of all before it: some of them positive, some not."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Conv2d(8 * (i + 1), 8, 3, padding=1) for i in range(3)
        )
        self.pool = nn.MaxPool2d(3, 1, 1) if pool else nn.Identity()
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        actual = [self.stem(x)]
        for number, layer in enumerate(self.layers):
            y = layer(torch.relu(torch.cat(actual, 1)))
            actual.append(torch.relu(self.pool(y)) if number % 2 else y)
        return self.last(torch.cat(actual, 1))


@pytest.mark.parametrize("target", [None, "tensorrt", "onnxruntime", "openvino"])
@pytest.mark.parametrize("pool", [True, False])
def test_a_dense_block_agrees_with_its_simulation(
    target: str | None, pool: bool
) -> None:
    torch.manual_seed(0)
    model = Dense(pool).eval()
    x = torch.randn(2, 3, 12, 12)
    simulated(model, [x], recipe(), target=target)
    # Without an example: a comparison would refuse a wrong result. 40 dB is one code in hundreds
    # off by one.
    assert sqnr(torchq.deploy(model)(x), model(x)) > 40


@pytest.mark.slow
def test_a_densenet_agrees_with_its_simulation() -> None:
    """Codes with and without negative values meet in its concatenations."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.DenseNet(8, (2,), 8, num_classes=10).eval()
    x = torch.randn(2, 3, 64, 64)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    torchq.fuse_(model, x)
    simulated(model, [x], recipe(), correct=False, target="openvino")
    assert sqnr(torchq.deploy(model, target="torch")(x), model(x)) > 40


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
        block = nn.Sequential(
            nn.Conv2d(4, 4, 1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
        )
        self.layers = container(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            block,
        )

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


@pytest.mark.sample(8)
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
def test_attributes_that_cannot_be_copied_are_shared(
    images: Tensor, make: Any, place: str
) -> None:
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

    model = nn.Sequential(
        Unique(3, 3, 1),
        nn.Conv2d(3, 3, 1),
    )
    calibrated(model, images)
    message = r"deploy: got a Sequential that cannot be copied \(there is only one\); expected one"
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(model)
