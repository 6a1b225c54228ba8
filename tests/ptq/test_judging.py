"""Algorithms that fit weights to few samples: what makes the model's outputs worse is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.ptq import gptq
from torchq.workflow.runs import Comparison

#: Each with as little work as it takes.
ALGORITHMS: dict[str, Callable[..., Any]] = {
    "gptq_": torchq.ptq.gptq_,
    "adaround_": lambda *args, **options: torchq.ptq.adaround_(
        *args, steps=4, **options
    ),
}


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return model.eval()


def rows(count: int, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 24, generator=generator) for _ in range(count)]


def quantized(batches: list[Tensor]) -> nn.Module:
    model = network()
    torchq.quantize_(model, torchq.recipes.integer(3, 8), progress=False)
    torchq.calibrate(model, batches, progress=False)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_as_before(model: nn.Module, before: dict[str, Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(after[name], value) for name, value in before.items()
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("count", "learned"), [(3, 3), (8, 7), (16, 14)])
def test_outputs_are_compared_on_batches_that_nothing_is_fitted_to(
    name: str, count: int, learned: int
) -> None:
    batches = rows(count)
    model = quantized(batches)
    before = state(model)
    report = ALGORITHMS[name](model, batches, progress=False)
    assert report.batches == learned
    assert report.outputs.batches == max(1, count - learned)
    assert report.outputs.gain > 0 and not is_as_before(model, before)
    assert ("that no weight was fitted to" in str(report)) == (learned < count)
    assert "stays as it was" not in str(report)
    judged = torch.cat(batches[learned:] or batches[-1:])
    with torch.no_grad():
        exact = network()(judged)
        noise = (model(judged) - exact).square().sum() / exact.square().sum()
    # The same numbers, added in another order.
    assert report.outputs.after == pytest.approx(float(noise), rel=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_makes_the_outputs_worse_is_undone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = rows(8)
    model = quantized(batches)
    before = state(model)
    # Weights that go the wrong way, as those of a fit to noise may.
    wanted = gptq.Moments.wanted
    monkeypatch.setattr(gptq.Moments, "wanted", lambda *args: -wanted(*args))
    report = ALGORITHMS[name](model, batches, progress=False)
    assert report.outputs.is_worse and is_as_before(model, before)
    assert "so the model stays as it was" in str(report)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_fit_to_samples_unlike_others_is_undone(name: str) -> None:
    """All learned rows are one row and its multiples: what the weights do beside it is free."""
    direction = torch.randn(24, generator=torch.Generator().manual_seed(2))
    batches = [x[:, :1] * direction for x in rows(7)]
    model = quantized(rows(4))
    before = state(model)
    report = ALGORITHMS[name](model, [*batches, *rows(1)], progress=False)
    errors = getattr(report, "layers", None) or report.blocks
    assert all(one.error_after < one.error_before for one in errors.values())
    assert report.outputs.is_worse and is_as_before(model, before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_a_comparison_all_batches_are_fitted_to(name: str) -> None:
    batches = rows(8)
    model = quantized(batches)
    report = ALGORITHMS[name](model, batches, compare=False, progress=False)
    assert report.batches == 8 and report.outputs == Comparison()
    assert not report.comparison and "output " not in str(report).splitlines()[-1]


@pytest.mark.filterwarnings("ignore:.*ended after")
def test_an_interrupt_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = rows(8)
    model: Any = quantized(batches)
    before = model[0].weight.clone()
    last = model[2].weight.clone()
    plain = gptq.BlockRounding.treat

    def treat(self: Any, number: int, block: Any) -> None:
        if number:
            raise KeyboardInterrupt
        plain(self, number, block)

    monkeypatch.setattr(gptq.BlockRounding, "treat", treat)
    with pytest.raises(KeyboardInterrupt):
        torchq.ptq.gptq_(model, batches, progress=False)
    assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[2].weight, last)
