"""quantize_ and restore_: in place, all or none, once, and back."""

import pytest
import torch
from torch import nn

import torchq
from torchq.errors import ConfigError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


X = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)


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
    text = r"nothing to quantize \(0: quantized already; 3: quantized already\)"
    with pytest.raises(ConfigError, match=text):
        torchq.quantize_(model)


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
