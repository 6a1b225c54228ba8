"""BatchNorm folded while training: the formula, the statistics, and exact folding afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchq
from tests.models import ConvNet, image_batches
from torchq.errors import ConfigError
from torchq.nn import QuantConv2d, QuantFoldedConv
from torchq.qat import freeze_bn_, quantize_folded_
from torchq.workflow import quantizers


def prepared(config: torchq.QuantConfig | None = None) -> Any:
    torch.manual_seed(0)
    model = ConvNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.3, 3.0)
    parameters = {id(p) for p in model.parameters()}
    report = quantize_folded_(model, config or torchq.recipes.int8_per_tensor())
    assert parameters == {id(p) for p in model.parameters()}
    torchq.calibrate(model, image_batches(), progress=False)
    return model, report


def test_it_folds_every_pair_and_quantizes_the_rest() -> None:
    model, report = prepared()
    assert report.blocks == ("stem.0", "left.0", "right.0")
    assert isinstance(model.stem[0], QuantFoldedConv) and isinstance(model.stem[1], nn.Identity)
    assert isinstance(model.head, torchq.nn.QuantLinear)
    assert len(quantizers(model)) == 8
    assert model.left[0].weight_quantizer.amax.numel() == 1


def test_training_forward_is_that_of_the_paper() -> None:
    """Codes come from the running statistics, mean and scale of the output from the batch."""
    model, _ = prepared()
    layer, x = model.stem[0].train(), image_batches()[0]
    conv, norm = copy.deepcopy(layer.branches.conv), copy.deepcopy(layer.branches.norm)
    found = layer(x)
    x = layer.input_quantizer(x)
    plain = conv(x)
    mean = plain.mean((0, 2, 3))
    variance = plain.var((0, 2, 3), correction=0)
    running = (norm.running_var + norm.eps).sqrt()
    kernel = conv.weight * (norm.weight / running).view(-1, 1, 1, 1)
    y = F.conv2d(x, layer.weight_quantizer(kernel), None, 1, 1)
    batch = (variance + norm.eps).sqrt()
    bias = norm.bias + norm.weight * (conv.bias - mean) / batch
    expected = y * (running / batch).view(-1, 1, 1) + bias.view(-1, 1, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_running_statistics_move_as_those_of_a_batchnorm() -> None:
    model, _ = prepared()
    layer, x = model.stem[0].train(), image_batches()[0]
    norm = copy.deepcopy(layer.branches.norm).train()
    norm(layer.branches.conv(layer.input_quantizer(x)))
    layer(x)
    torch.testing.assert_close(layer.branches.norm.running_mean, norm.running_mean)
    torch.testing.assert_close(layer.branches.norm.running_var, norm.running_var)


def test_frozen_statistics_train_what_is_deployed() -> None:
    model, _ = prepared()
    freeze_bn_(model)
    x = image_batches()[0]
    assert torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("recipe", ["int8_per_tensor", "int8"])
def test_folding_afterwards_changes_no_bit(recipe: str) -> None:
    model, _ = prepared(torchq.recipes.by_name(recipe))
    optimizer = torch.optim.SGD(torchq.qat.param_groups(model, lr=0.05), momentum=0.9)
    losses = []
    x, target = image_batches()[0], torch.arange(4)
    for _ in range(20):
        loss = F.cross_entropy(model.train()(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    expected = model.eval()(x)
    torchq.fuse_(model, x, progress=False)
    assert isinstance(model.stem[0], QuantConv2d)
    assert torch.equal(model(x), expected)


def test_errors_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Sequential has no convolution with a BatchNorm behind"):
        quantize_folded_(model)
    assert type(model[0]) is nn.Linear
    net = ConvNet()
    with pytest.raises(ConfigError):
        quantize_folded_(net, exclude="*.0")
    assert type(net.stem[0]) is nn.Conv2d
