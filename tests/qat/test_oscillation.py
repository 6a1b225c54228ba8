"""Oscillating weights: they are counted, damped and frozen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError
from torchq.qat import Oscillations, dampening_loss


def one_weight(values: list[float]) -> nn.Module:
    """Return a layer whose weights have codes from -8 to 7 at a distance of 1."""
    model = nn.Sequential(nn.Linear(len(values), 1, bias=False))
    descriptor = QuantDescriptor(4, amax=7.0)
    torchq.quantize_(model, QuantConfig((Rule("0", weight=descriptor),)))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([values]))
    return model


def set_weights(model: nn.Module, values: list[float]) -> None:
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([values]))


def test_only_changes_back_count() -> None:
    """The first weight goes to and fro, the second goes up, the third stays."""
    model = one_weight([0.4, 0.0, 2.0])
    oscillations = Oscillations(model, momentum=0.5)
    for step in range(1, 5):
        set_weights(model, [0.6 if step % 2 else 0.4, float(step), 2.0])
        oscillations.update_()
    # The first change has nothing to go back on; then three: 0.5 + 0.25 + 0.125.
    state = oscillations.state_dict()
    assert state["0.weight_quantizer.frequency"].tolist() == [[0.875, 0.0, 0.0]]
    assert oscillations.share() == pytest.approx(1 / 3)
    assert oscillations.frozen() == 0.0


def test_a_frozen_weight_stays_at_its_average_code() -> None:
    model = one_weight([0.4, 3.3])
    oscillations = Oscillations(model, momentum=0.4, freeze_above=0.5)
    for step in range(6):
        set_weights(model, [1.6 if step % 2 else 0.6, 3.3])
        oscillations.update_()
    assert oscillations.frozen() == 0.5
    frozen = model[0].weight[0, 0].item()
    assert frozen in (1.0, 2.0) and model[0].weight[0, 1].item() == pytest.approx(3.3)
    set_weights(model, [-5.0, -5.0])
    oscillations.update_()
    assert model[0].weight[0].tolist() == [frozen, -5.0]


def test_watching_alone_changes_no_weight() -> None:
    model = one_weight([0.4, 3.3])
    oscillations = Oscillations(model)
    before = model[0].weight.detach().clone()
    oscillations.update_()
    assert torch.equal(model[0].weight, before)


def test_a_run_continues_from_its_state() -> None:
    whole, half = (one_weight([0.4, 3.3]) for _ in range(2))
    watched = Oscillations(whole, momentum=0.4, freeze_above=0.5)
    first = Oscillations(half, momentum=0.4, freeze_above=0.5)

    def run(model: nn.Module, oscillations: Oscillations, steps: range) -> None:
        for step in steps:
            set_weights(model, [1.6 if step % 2 else 0.6, 3.3])
            oscillations.update_()

    run(whole, watched, range(7))
    run(half, first, range(3))
    second = Oscillations(half, momentum=0.4, freeze_above=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(half, second, range(3, 7))
    expected, found = watched.state_dict(), second.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    with pytest.raises(ConfigError, match="got a state with other entries"):
        second.load_state_dict({})


def test_the_loss_pulls_towards_the_codes_and_leaves_clipped_weights() -> None:
    model = one_weight([0.4, 2.75, -9.0])
    loss = dampening_loss(model)
    loss.backward()
    assert loss.item() == pytest.approx(0.4**2 + 0.25**2)  # -9 is clipped.
    torch.testing.assert_close(model[0].weight.grad, torch.tensor([[0.8, -0.5, 0.0]]))


@pytest.mark.parametrize("descriptor", [{"axis": 0}, {"block_size": 2}, {"symmetric": False}])
def test_every_granularity(descriptor: dict[str, object]) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    weight = QuantDescriptor(4, **descriptor)  # type: ignore[arg-type]
    torchq.quantize_(model, QuantConfig((Rule("0", weight=weight),)))
    torchq.calibrate(model, progress=False)
    quantizer = model[0].weight_quantizer
    # No weight lies at the very end of a range, where it is half clipped.
    ends = [torch.full_like(quantizer.amax, sign * 0.8) for sign in (-1, 1)]
    quantizer.set_range(*ends) if "symmetric" in descriptor else quantizer.set_amax(ends[1])
    dampening_loss(model).backward()
    error = model[0].weight - quantizer(model[0].weight)
    torch.testing.assert_close(model[0].weight.grad, 2 * error.detach(), rtol=1e-4, atol=1e-6)
    oscillations = Oscillations(model, freeze_above=-1.0)  # This freezes every weight at once.
    expected = quantizer(model[0].weight).detach()
    oscillations.update_()
    torch.testing.assert_close(model[0].weight.detach(), expected)


def test_errors() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    torchq.quantize_(model)
    with pytest.raises(ConfigError, match="dampening_loss: got patterns without a weight quant"):
        dampening_loss(model)
    with pytest.raises(ConfigError, match="Oscillations: got patterns without a quantizer of a"):
        Oscillations(model)
    with pytest.raises(ConfigError, match=r"got momentum=1\.5; expected a number 0 to 1"):
        Oscillations(one_weight([1.0]), momentum=1.5)
