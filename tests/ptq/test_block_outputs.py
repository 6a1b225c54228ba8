"""Outputs of finished blocks are forgotten once nothing needs them, and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.ptq import gptq_
from torchq.ptq.replay import OutputWatch
from torchq.ptq.store import TensorStore

X = torch.rand(32, 6, generator=torch.Generator().manual_seed(0))


class Kernel(nn.Module):
    """A module that computes unseen, as kernels of extensions do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return 2 * x


class Net(nn.Module):
    """Four blocks of two layers, in a forward that is given."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(4)
        )
        self.kernel, self.run = Kernel(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def chain(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        assert x.shape[1] == x.size(1) == 6  # Shapes are known of what is forgotten.
    return x


def with_module(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = net.kernel(block(x))
    return x


def with_function(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = 2 * block(x)
    return x


def with_long_shortcut(net: Any, x: Tensor) -> Tensor:
    first = net.blocks[0](x)
    x = net.blocks[1](first)
    x = net.blocks[2](x)
    return net.blocks[3](x + first)


def with_late_reader(net: Any, x: Tensor) -> Tensor:
    first = net.blocks[0](x)
    for block in (net.blocks[1], net.blocks[2], net.blocks[3]):
        x = block(x)
    return x + first


def rounded(run: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], dict[str, Any]]:
    """Return the blocks whose outputs were forgotten, and the values of the rounded model."""
    model, found = Net(run).eval(), set()
    torchq.quantize_(model, torchq.recipes.integer(3, None, weight_method="max"))
    blank = TensorStore.blank

    def noted(store: TensorStore, key: Any) -> None:
        found.add(key[1])
        blank(store, key)

    with monkeypatch.context() as patched:
        patched.setattr(TensorStore, "blank", noted)
        report = gptq_(model, [X, X + 1], block="blocks.*", progress=False)
    assert len(report.layers) == 8
    return found, model.state_dict()


@pytest.mark.parametrize(
    ("run", "forgotten"),
    [
        (chain, {0, 1}),
        (with_module, set()),
        (with_function, set()),
        (with_long_shortcut, {1}),
        (with_late_reader, {1}),
    ],
)
def test_what_nothing_reads_is_forgotten(
    run: Any, forgotten: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, state = rounded(run, monkeypatch)
    assert found == forgotten
    monkeypatch.setattr(OutputWatch, "next_begins", lambda self: None)
    nothing, expected = rounded(run, monkeypatch)
    assert nothing == set()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
