"""How often a model runs while it is fused, planned, quantized and deployed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import torchq


class Net(nn.Module):
    """A residual block with BatchNorm, and a head that runs once in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head((x + self.norm(self.conv(x))).relu().mean((2, 3)))


def forwards(run: Callable[[], Any]) -> int:
    """Return how often the head of any copy of the network runs, simulated or deployed."""
    count = 0

    def note(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += isinstance(module, nn.Linear)

    handle = register_module_forward_pre_hook(note)
    try:
        run()
    finally:
        handle.remove()
    return count


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "torch"])
def test_a_model_runs_a_few_times(target: str) -> None:
    for package in ("onnxruntime", "openvino"):
        pytest.importorskip(package)
    model = Net().eval()
    x = torch.randn(2, 3, 8, 8)
    assert forwards(lambda: torchq.fuse_(model, x)) <= 4
    # Products of weights of 8 bits overflow on CPUs without VNNI.
    config = torchq.recipes.int8(reduce_range=True)
    assert (
        forwards(lambda: torchq.quantize_(model, config, target=target, example=x)) <= 4
    )
    torchq.calibrate(model, [x], progress=False)
    # On two inputs and other lengths, with the deployed model's own runs where its layers show.
    assert forwards(lambda: torchq.deploy(model, x, target=target)) <= 9
