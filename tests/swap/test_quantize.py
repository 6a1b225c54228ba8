"""quantize_ and restore_: in place, all or none, once, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq import QuantDescriptor, TensorQuantizer
from torchq.errors import ConfigError, QuantizationError
from torchq.nn import QuantLinear, QuantModule
from torchq.swap import apply as swap_modules


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


X = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)


def test_a_bare_layer_is_quantized_in_place() -> None:
    layer = nn.Linear(3, 2)
    report = torchq.quantize_(layer)
    assert (
        type(layer) is QuantLinear and report.replaced[0].names == ("",) and "(root)" in str(report)
    )
    assert layer.input_quantizer.name == "input_quantizer"


def test_restore_gives_everything_back() -> None:
    model = net()
    objects = {n: id(v) for n, v in (*model.named_parameters(), *model.named_modules())}
    classes, expected, keys = [type(m) for m in model.modules()], model(X), list(model.state_dict())
    for _ in range(2):
        torchq.quantize_(model)
        torchq.calibrate(model, [X], progress=False)
        assert not torch.equal(model(X), expected)
        assert torchq.restore_(model)
        assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys
        assert {n: id(v) for n, v in (*model.named_parameters(), *model.named_modules())} == objects
        assert torch.equal(model(X), expected)
    assert torchq.restore_(model) == ()


def test_a_second_time_quantizes_what_is_left() -> None:
    model = net()
    torchq.quantize_(model, include="0")
    first = model[0].input_quantizer
    report = torchq.quantize_(model)
    assert [d.name for d in report.replaced] == ["3"]
    assert {d.name: d.reason for d in report.skipped} == {"0": "quantized already"}
    assert model[0].input_quantizer is first
    with pytest.raises(
        ConfigError, match=r"nothing to quantize \(0: quantized already; 3: quantized already\)"
    ):
        torchq.quantize_(model)


def test_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a conversion fails half-way, the ones before it are undone."""
    model, real = net(), swap_modules.convert_

    def fails_on_linear(module: nn.Module, **options: Any) -> nn.Module:
        if isinstance(module, nn.Linear):
            raise QuantizationError("no")
        return real(module, **options)

    monkeypatch.setattr(swap_modules, "convert_", fails_on_linear)
    with pytest.raises(QuantizationError, match="no"):
        torchq.quantize_(model)
    assert [type(m) for m in model] == [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Linear]
    assert not any(isinstance(m, QuantModule | TensorQuantizer) for m in model.modules())


def test_plain_references_see_the_quantized_module() -> None:
    """As in detectron2's FPN: layers kept in a plain list beside the module tree."""

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lateral = nn.Linear(4, 4)
            self.stages = [self.lateral]
            self.by_name = {"lateral": (self.lateral,)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stages[0](x) + self.by_name["lateral"][0](x)

    model, x = Pyramid(), torch.randn(2, 4)
    expected = model(x)
    torchq.quantize_(model)
    assert model.stages[0] is model.lateral and type(model.stages[0]) is QuantLinear
    assert not torch.equal(model(x), expected)


def test_user_placed_quantizers_are_left_alone() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.residual = TensorQuantizer(QuantDescriptor(4, learn_amax=True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + self.residual(x)

    model, x = Block(), torch.randn(3, 4)
    own = model.residual
    report = torchq.quantize_(model)
    assert (
        [d.name for d in report.decisions] == ["fc"]
        and model.residual is own
        and own.name == "residual"
    )
    torchq.calibrate(model, [x], progress=False)
    assert own.calibrated and own.amax.item() == x.abs().max().item()
    torchq.restore_(model)
    assert model.residual is own and own.calibrated and type(model.fc) is nn.Linear


class Counts(nn.Module):
    """A forward that changes a buffer and stores its result, as running statistics and caches."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(4, 4), nn.Buffer(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.fc(x)
        return self.last + x


@pytest.mark.parametrize("target", [None, "onnxruntime"])
def test_runs_on_an_example_leave_buffers_and_attributes_alone(target: str | None) -> None:
    model = Counts()
    torchq.quantize_(model, target=target, example=torch.randn(3, 4))
    assert model.calls.item() == 0 and not hasattr(model, "last")


def test_an_interrupted_restore_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torchq.quantize_(model)
    done: list[nn.Module] = []

    def interrupted(module: nn.Module) -> nn.Module:
        if done:
            raise KeyboardInterrupt
        done.append(module)
        return torchq.nn.revert_(module)

    monkeypatch.setattr("torchq.swap.apply.revert_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchq.restore_(model)
    assert [type(layer) for layer in model] == [torchq.nn.QuantLinear] * 2
    assert done == [model[0]] and "0.weight_quantizer.amax" in model.state_dict()
