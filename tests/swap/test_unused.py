"""Layers that nothing calls are said to be so, in the plan and in the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.swap.unused import NOT_CALLED

X = torch.randn(2, 4)


class Heads(nn.Module):
    """One head that runs, one for training, one that was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux, self.forgotten = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.aux(x) if self.training else self.main(x)


class ByName(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.__class__.__name__.lower())(x)


def notes(model: nn.Module, example: Any = None) -> dict[str, str]:
    return {d.name: d.note for d in torchq.plan(model, example=example).decisions if d.note}


def test_a_run_shows_what_is_not_called() -> None:
    assert notes(Heads().eval(), X) == {"aux": NOT_CALLED, "forgotten": NOT_CALLED}
    report = torchq.quantize_(Heads(), example=X)
    assert "not called in" in str(report) and not report.skipped


def test_without_an_example_code_shows_what_nothing_reads() -> None:
    (name,) = notes(nn.Sequential(Heads()))
    assert name == "0.forgotten"


@pytest.mark.parametrize(
    "model",
    [
        ByName(),
        nn.Sequential(nn.Linear(4, 4)),
        nn.ModuleDict({"a": nn.Linear(4, 4)}),
        nn.TransformerEncoderLayer(4, 2),
        nn.Linear(4, 4),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_may_be_reached_by_other_names_has_no_note(model: nn.Module) -> None:
    assert notes(model) == {}
