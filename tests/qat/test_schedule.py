"""Schedules: the state of a model follows from the number of the step."""

import copy

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, image_batches, simulated
from torchq.qat import freeze_bn_from_, freeze_ranges_from_, observing
from torchq.workflow import quantizers


def calibrated() -> nn.Module:
    torch.manual_seed(0)
    return simulated(
        ConvNet().train(),
        image_batches(),
        torchq.recipes.w4a4(),
    )


def train(
    model: nn.Module, first: int, last: int, optimizer: torch.optim.Optimizer
) -> None:
    for step in range(first, last):
        freeze_bn_from_(model, step, 3)
        freeze_ranges_from_(model, step, 4)
        model.train()
        loss = model(image_batches()[step % 2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(torchq.qat.param_groups(model, lr=0.01), momentum=0.9)


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_resumed_run_equals_the_whole_one_bit_for_bit(stop: int) -> None:
    """A new model and optimizer continue from state dicts alone, in every phase of the schedule."""
    whole = calibrated()
    train(whole, 0, 6, sgd(whole))
    first = calibrated()
    optimizer = sgd(first)
    train(first, 0, stop, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = ConvNet()
    torchq.quantize_(second, torchq.recipes.w4a4())
    second.load_state_dict(saved[0])
    resumed = sgd(second)
    resumed.load_state_dict(saved[1])
    train(second, stop, 6, resumed)
    actual = second.state_dict()
    expected = whole.state_dict()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_frozen_ranges_stay_and_can_be_freed() -> None:
    model = calibrated()
    learned = {
        n: q.amax for n, q in quantizers(model).items() if q.descriptor.learn_amax
    }
    assert set(freeze_ranges_from_(model, 5, 5)) == set(learned)
    before = {name: amax.detach().clone() for name, amax in learned.items()}
    optimizer = sgd(calibrated())
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model(image_batches()[0]).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(amax, before[name]) for name, amax in learned.items())
    assert freeze_ranges_from_(model, 6, 5) == ()
    assert set(freeze_ranges_from_(model, 4, 5)) == set(learned)
    assert all(amax.requires_grad for amax in learned.values())


def test_observing_follows_the_data_while_it_quantizes() -> None:
    model = simulated(
        nn.Sequential(nn.Linear(2, 2)),
        [torch.ones(1, 2)],
    )
    seen: list[Tensor] = []
    model[0].register_forward_pre_hook(
        lambda m, args: seen.append(m.input_quantizer(args[0]))
    )
    with observing(model) as names:
        model(torch.full((1, 2), 4.0))
    assert names == ("0.input_quantizer",)
    assert seen[0].max() == 1.0  # Inside the block the old range holds.
    assert model[0].input_quantizer.amax == 4.0
    assert model[0].input_quantizer.mode == "quantize"


def test_observing_changes_nothing_on_an_exception_and_where_no_data_came() -> None:
    model = simulated(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [torch.ones(1, 2)]
    )
    before = [q.amax.clone() for q in quantizers(model).values()]
    with pytest.raises(RuntimeError, match="mat1 and mat2"), observing(model):
        model(torch.full((1, 3), 4.0))
    with observing(model):
        pass
    for q, amax in zip(quantizers(model).values(), before, strict=True):
        assert torch.equal(q.amax, amax)
        assert q.mode == "quantize"
        assert q.calibrator is None
