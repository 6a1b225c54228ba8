"""Deployed models in other processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated


def compare(model: nn.Module, x: Tensor, expected: Tensor) -> None:
    """Run in another process, which ends with an error where the results differ."""
    assert torch.equal(model(x), expected)


def test_a_spawned_process_gets_a_deployed_model_that_has_run() -> None:
    x = torch.randn(1, 3, 8, 8)
    model = torchq.deploy(calibrated(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x), x)
    arguments = (model, x, model(x))
    process = torch.multiprocessing.get_context("spawn").Process(target=compare, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0
