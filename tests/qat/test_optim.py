"""Parameter groups of QAT."""

from __future__ import annotations

import torch
from torch import nn

import torchq
from torchq.qat import param_groups


def _model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    torchq.quantize_(model, torchq.recipes.w4a4())
    return model


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = _model()
    model[0].bias.requires_grad_(False)
    groups = param_groups(model, lr=0.1, weight_decay=0.01, range_lr=0.001)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
        "weights": (0.1, 0.01),
        "biases_and_norms": (0.1, 0.0),
        "ranges": (0.001, 0.0),
    }
    assert len(groups[2]["params"]) == 4


def test_float_model_has_no_range_group() -> None:
    assert [g["name"] for g in param_groups(nn.Linear(2, 2), lr=0.1)] == ["weights", "biases_and_norms"]


def test_groups_train_ranges_that_were_calibrated_after_the_optimizer_was_built() -> None:
    model = _model()
    optimizer = torch.optim.SGD(param_groups(model, lr=0.1))
    x = torch.randn(4, 1, 4, 4)
    torchq.calibrate(model, [x], progress=False)
    before = model[0].input_quantizer.amax.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].input_quantizer.amax, before)
