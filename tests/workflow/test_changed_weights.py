"""Weights that changed after their ranges were found are named where the model leaves training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import simulated
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.workflow.changed_weights import warn_of_changed_weights

BATCH = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
RECIPE = torchq.recipes.int8(reduce_range=True)  # It overflows on no CPU.


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


@torch.no_grad()
def merge_adapter(model: Any) -> None:
    """Add a product of two thin matrices to the first weight, as the adapters of LoRA do."""
    generator = torch.Generator().manual_seed(2)
    up = 0.4 * torch.randn(32, 4, generator=generator)
    down = 0.4 * torch.randn(4, 16, generator=generator)
    model[0].weight += up @ down


def export(model: nn.Module, folder: Path) -> None:
    torchq.export_onnx(model, BATCH, folder / "m.onnx", dynamo=False, progress=False)


def deploy(model: nn.Module, folder: Path) -> None:
    torchq.deploy(model, BATCH, progress=False)


def verify(model: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(model, folder)
    torchq.verify_onnx(model, folder / "m.onnx", [BATCH], progress=False)


WAYS = [export, deploy, verify]


@pytest.mark.parametrize("way", WAYS)
def test_a_merged_adapter_is_named(
    way: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model = simulated(net(), [BATCH], RECIPE)
    merge_adapter(model)
    expected = "0.weight_quantizer: the weight reaches far beyond the range that was found on it"
    with pytest.warns(UserWarning, match=expected) as seen:
        way(model, tmp_path)
    assert not any("2.weight_quantizer" in str(warning.message) for warning in seen)
    torchq.calibrate(model, [BATCH], force=True, progress=False)
    way(model, tmp_path)  # A warning would be an error here.


def trained(model: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        optimizer.step()


def averaged(model: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    trained(model)
    average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


@pytest.mark.parametrize("change", [trained, averaged])
def test_training_that_holds_the_ranges_is_no_reason_to_warn(
    change: Callable[[Any], None],
) -> None:
    model = simulated(net(), [BATCH], RECIPE)
    before = model[0].weight.detach().clone()
    change(model)
    assert not torch.equal(model[0].weight, before)
    warn_of_changed_weights("deploy", model)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_ranges_that_a_method_cut_are_no_reason_to_warn(bits: int) -> None:
    descriptor = torchq.QuantDescriptor(bits, axis=0, calib_method="mse")
    config = torchq.QuantConfig((torchq.Rule("*", input=None, weight=descriptor),))
    model = net()
    with torch.no_grad():
        model[0].weight.normal_()
    warn_of_changed_weights("deploy", simulated(model, [BATCH], config, correct=False))


def test_ranges_that_somebody_set_are_no_reason_to_warn() -> None:
    descriptor = torchq.QuantDescriptor(8, amax=0.01)
    config = torchq.QuantConfig((torchq.Rule("*", input=None, weight=descriptor),))
    warn_of_changed_weights("deploy", simulated(net(), [BATCH], config, correct=False))


@pytest.mark.parametrize("block_size", [None, 8])
def test_a_range_of_two_ends_is_as_large_as_the_farther_one(
    block_size: int | None,
) -> None:
    weight = QuantDescriptor(4, symmetric=False, unsigned=True, block_size=block_size)
    model = nn.Sequential(nn.Linear(16, 4))
    nn.init.uniform_(model[0].weight, -0.3, 0.1)
    torchq.quantize_(model, QuantConfig((Rule("0", weight=weight),)))
    torchq.calibrate(model, [torch.randn(4, 16)], progress=False)
    warn_of_changed_weights("deploy", model)
    with torch.no_grad():
        model[0].weight *= 2
    with pytest.warns(
        UserWarning, match="0.weight_quantizer: the weight reaches far beyond"
    ):
        warn_of_changed_weights("deploy", model)
