"""Layers that nothing calls are said to be so, in the plan and in the report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.swap.calls import NOT_CALLED

X = torch.randn(2, 4)


class Heads(nn.Module):
    """One head that runs, one for training, one that was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux, self.forgotten = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.aux(x) if self.training else self.main(x)


def notes(model: nn.Module, example: Any = None) -> dict[str, str]:
    return {d.name: d.note for d in torchq.plan(model, example=example).decisions if d.note}


def test_a_run_shows_what_is_not_called() -> None:
    assert notes(Heads().eval(), X) == {"aux": NOT_CALLED, "forgotten": NOT_CALLED}
    report = torchq.quantize_(Heads(), example=X)
    assert "not called in" in str(report) and not report.skipped
