"""Concatenations of a chain have one range where their ranges are nearly equal."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn import TensorQuantizer
from torchq.workflow import nearly_equal_ranges

_LINKS = 4


class Chain(nn.Module):
    """A dense block, each link of which has values larger by a factor than those before it."""

    def __init__(self, growth: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.links = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 1) for i in range(_LINKS))
        self.head = nn.Conv2d(8 + 4 * _LINKS, 6, 1)
        with torch.no_grad():
            for i, link in enumerate(self.links):
                link.weight.zero_()
                link.weight[range(4), range(4)] = growth ** (i + 1)
                link.bias.zero_()
            weight = torch.rand(self.head.weight.shape, generator=generator)
            self.head.weight.copy_(weight)
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = torch.cat([x, link(x)], 1)
        return self.head(x)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.rand(4, 8, 8, 8, generator=generator) for _ in range(2)]


def calibrated(growth: float, target: str, **options: Any) -> nn.Module:
    model = Chain(growth).eval()
    torchq.quantize_(model, target=target, example=batches()[0], progress=False)
    torchq.calibrate(model, batches(), progress=False, **options)
    return model


def ranges(model: nn.Module) -> list[float]:
    cats = [m for m in model.modules() if isinstance(m, torchq.nn.QuantCat)]
    assert len(cats) == _LINKS
    return [float(cat.input_quantizer.amax) for cat in cats]


@torch.no_grad()
def decibels(model: nn.Module, growth: float) -> float:
    exact = [Chain(growth).eval()(x) for x in batches()]
    noise = [model(x) - y for x, y in zip(batches(), exact, strict=True)]
    power = sum(float(y.square().sum()) for y in exact)
    return 10 * math.log10(power / sum(float(n.square().sum()) for n in noise))


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
def test_nearly_equal_ranges_of_a_chain_become_one(
    target: str, correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calibrated(1.01, target, correct=correct)
    last = ranges(model)[-1]
    assert ranges(model) == [last] * _LINKS
    monkeypatch.setattr(nearly_equal_ranges, "may_be_equal", lambda *_: False)
    apart = calibrated(1.01, target, correct=correct)
    assert ranges(apart) == sorted(set(ranges(apart)))
    assert last == ranges(apart)[-1]
    assert decibels(model, 1.01) > decibels(apart, 1.01) + 3


def test_each_quantizer_keeps_a_range_of_its_own() -> None:
    model = calibrated(1.01, "tensorrt")
    quantizers = {
        id(m.input_quantizer): m.input_quantizer
        for m in model.modules()
        if isinstance(m, torchq.nn.QuantCat)
    }
    assert len(quantizers) == _LINKS
    assert len({q.amax.data_ptr() for q in quantizers.values()}) == _LINKS


def test_ranges_that_differ_more_stay_as_they_are() -> None:
    actual = ranges(calibrated(1.5, "tensorrt"))
    expected = [actual[0] * 1.5**i for i in range(_LINKS)]
    assert actual == pytest.approx(expected, rel=1e-5)


def test_ranges_that_were_known_before_stay_as_they_are() -> None:
    model = calibrated(1.5, "tensorrt")
    known = model.quant_cat.input_quantizer
    assert isinstance(known, TensorQuantizer)
    before = float(known.amax)
    again = copy.deepcopy(model)
    again.quant_cat_1.input_quantizer.forget_amax()
    with pytest.warns(UserWarning, match="keep their ranges"):
        torchq.calibrate(again, [x * 1.4 / 1.5 for x in batches()], progress=False)
    assert float(again.quant_cat.input_quantizer.amax) == before
