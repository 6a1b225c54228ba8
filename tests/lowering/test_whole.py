"""Models are fused as a whole where that works, and stay what code around them expects."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import calibrated, recipe, sqnr
from tests.models import Parts, simulated


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 9, 9)


def graphs(model: nn.Module) -> int:
    return sum(isinstance(m, fx.GraphModule) for m in model.modules())


class Block(Parts):
    """A layer of ultralytics: the model's loop reads ``f``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class Picky(nn.Module):
    """Code that looks at its input and cannot be traced, around two layers that can."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(
            conv=nn.Conv2d(3, 3, 1),
            act=nn.ReLU(),
            f=[-1],
        )
        self.last = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.last(self.block(x)) * self.block.f[0]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "a copy of what was pickled": lambda m: copy.deepcopy(
        pickle.loads(pickle.dumps(m))
    ),
    "dtype": lambda m: copy.deepcopy(m).to(torch.float32),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_part_keep_its_attributes(images: Tensor, how: str) -> None:
    int8 = torchq.deploy(calibrated(Picky(), images), images)
    other = COPIES[how](int8)
    assert graphs(other) == 1
    assert other.block.f == [-1]
    assert other.block.f is not int8.block.f
    assert torch.equal(other(images), int8(images))


@dataclasses.dataclass
class Result(OrderedDict[str, Any]):
    """What transformers return: a dictionary with attributes."""

    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def as_dict(y: Tensor) -> dict[str, Tensor]:
    return {"logits": y}


def as_ordered(y: Tensor) -> OrderedDict[str, Any]:
    return OrderedDict(logits=y, inner=OrderedDict(logits=y))


def as_result(y: Tensor) -> Result:
    return Result(logits=y)


def as_tuple(y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return y, [y]


def as_unknown(y: Tensor) -> Unknown:
    return Unknown(logits=y)


class Unknown(dict[str, Any]):
    pass


class Answering(nn.Module):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 3, 1),
            nn.Conv2d(3, 3, 1),
        )
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.layers(x))


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (as_dict, True),
        (as_ordered, True),
        (as_result, True),
        (as_tuple, True),
        (as_unknown, False),
    ],
)
@pytest.mark.parametrize("compare", [False, True])
def test_results_are_of_the_same_kind(
    images: Tensor, answer: Callable[[Tensor], Any], whole: bool, compare: bool
) -> None:
    model = calibrated(Answering(answer), images)
    int8 = torchq.deploy(model, images if compare else None)
    # Code that cannot be traced may index its Sequential.
    assert isinstance(int8, fx.GraphModule) == whole == graphs(int8)
    for copied in (int8, copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))):
        got = copied(images)
        expected = model(images)
        assert type(got) is type(expected)
        if isinstance(expected, dict):
            assert list(got) == list(expected)
            assert type(got.get("inner")) is type(expected.get("inner"))
            got, expected = [got["logits"]], [expected["logits"]]
        assert sqnr(got[0], expected[0]) > 40


class Optional(Parts):
    def forward(
        self, x: Tensor, scale: Tensor | None = None, factor: float = 2.5
    ) -> Tensor:
        x = self.first(x) * factor
        return self.last(x if scale is None else x * scale)


def test_arguments_that_a_trace_fixed_are_refused_or_used(images: Tensor) -> None:
    example = {"x": images, "scale": torch.tensor(3.0)}
    model = simulated(
        Optional(first=nn.Conv2d(3, 3, 1), last=nn.Conv2d(3, 3, 1)).eval(),
        [example],
        recipe(),
    )
    fixed = torchq.deploy(model)
    for copied in (fixed, copy.deepcopy(fixed), pickle.loads(pickle.dumps(fixed))):
        assert sqnr(copied(images), model(images)) > 40
        with pytest.raises(
            AssertionError, match="scale has been specialized to have value None"
        ):
            copied(**example)
    int8 = torchq.deploy(model, example)
    assert sqnr(int8(**example), model(**example)) > 40
    for factor, whole in ((2.5, True), (3.0, False)):
        assert graphs(torchq.deploy(model, {"x": images, "factor": factor})) == whole


class Called(nn.Module):
    """A part that code around it can only call."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Head(nn.Module):
    """Looks at the size of its input, and keeps what it found: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Called(
            nn.Conv2d(4, 4, 1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
        )
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.seen:
            self.seen = x.shape[-1]
        return self.layers(x) / self.seen


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Called(
            nn.Conv2d(3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2, 4, 1),
        )
        self.heads = nn.ModuleList([Head(), Head()])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.interpolate(self.body(x).relu(), scale_factor=2)
        return [head(x) for head in self.heads]


def test_parts_that_can_be_traced_are_fused_in_a_model_that_cannot(
    images: Tensor,
) -> None:
    model = calibrated(Detector(), images)
    int8 = torchq.deploy(model, images)
    assert type(int8) is Detector
    assert type(int8.get_submodule("heads.0")) is Head
    assert graphs(int8) == 3  # the body, and what the heads call
    for x in (images, images[:1, :, :, :7]):
        assert all(
            sqnr(got, expected) > 40
            for got, expected in zip(int8(x), model(x), strict=True)
        )
