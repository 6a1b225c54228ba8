"""Runs that start in the middle give what whole runs give, whatever a forward does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchq

WIDTH = 24


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Branching(nn.Module):
    """Its forward looks at values, which no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if float(x.detach().sum()) < 1e9 else self.c(x)


class InPlace(nn.Module):
    """Changes results of layers in place, with and without giving them a new name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.block = nn.Sequential(nn.ReLU(inplace=True), linear())
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.relu(self.a(x))
        second = self.b(first)
        self.relu(second)
        second -= first
        return self.c(self.block(second) + second)


class Shared(nn.Module):
    """Calls one layer three times, once of them inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = linear(), linear()
        self.block = nn.Sequential(self.a, linear())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x) + self.a(self.a(x).relu()))


class Pair(nn.Module):
    """Returns a pair, the first part of which its caller changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x)
        return x, x.sin()


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(), linear()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair(x)
        first.mul_(2)
        return self.last(first + second)


class Routed(nn.Module):
    """A small batch takes another way than a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.small, self.large, self.last = linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.last(self.small(x) if len(x) < 8 else self.large(x))


def prepared(model: nn.Module, sizes: tuple[int, ...]) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    batches = [torch.randn(size, WIDTH) for size in sizes]
    torchq.quantize_(model.eval(), torchq.recipes.integer(5, 5))
    torchq.calibrate(model, batches, on_unseen="dynamic", progress=False)
    return model, batches


@torch.no_grad()
def whole_runs(model: nn.Module, batches: list[Tensor], mode: str) -> dict[str, float]:
    """Return the ratio of every layer, each measured by running the whole model."""
    layers = [n for n, m in model.named_modules() if isinstance(m, torchq.nn.QuantModule)]
    found = {}
    for name in layers:
        others = [other for other in layers if (other != name) == (mode == "only")]
        signal = noise = 0.0
        for batch in batches:
            with torchq.disabled(model):
                expected = model(batch).double()
            with torchq.disabled(model, [f"{other}.*_quantizer" for other in others]):
                noise += float((model(batch).double() - expected).square().sum())
            signal += float(expected.square().sum())
        found[name] = float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))
    return found


@pytest.mark.parametrize("mode", ["only", "all_but"])
@pytest.mark.parametrize("kind", [InPlace, Shared, OfPairs, Routed])
@pytest.mark.parametrize("sizes", [(16, 16), (4, 16, 5, 32)])
def test_values_are_those_of_whole_runs(
    kind: type[nn.Module], mode: str, sizes: tuple[int, ...]
) -> None:
    model, batches = prepared(kind(), sizes)
    if kind is Routed and len(sizes) == 2:
        batches = [batches[0], batches[1], batches[0][:5]]  # A layer is reached by the last alone.
    report = torchq.sensitivity(model, batches, mode=mode, progress=False)
    assert {row.name: row.value for row in report.rows} == pytest.approx(
        whole_runs(model, batches, mode), rel=1e-5
    )
    assert not report.note
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_behind_code_that_looks_at_values_start_in_the_middle() -> None:
    model, batches = prepared(Branching(), (16, 16))
    with FlopCounterMode(display=False) as one, torch.no_grad():
        model(batches[0])
    with FlopCounterMode(display=False) as counter:
        report = torchq.sensitivity(model, batches, progress=False)
    assert report.unseen == ("c",)
    assert {row.name for row in report.rows} == {"a", "b"}
    # Float, quantized, a and half of b, for two batches; the first is followed and checked too.
    whole, half = 2 * 3 + 1, 2 * 0.5 + 0.5
    assert counter.get_total_flops() == (whole + half) * one.get_total_flops()


class Remembering(nn.Module):
    """Its first block hands a value on beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []
        self.first, self.last = _Writer(self.memory), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.memory.clear()
        x = self.first(x)
        return self.last(x + sum(self.memory))


class _Writer(nn.Module):
    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.memory = linear(), memory

    def forward(self, x: Tensor) -> Tensor:
        self.memory.append(x)
        return self.layer(x)


def test_a_block_that_does_more_than_return_runs_again() -> None:
    model, batches = prepared(Remembering(), (16,))
    report = torchq.sensitivity(model, batches, progress=False)
    assert "each run is a whole one" in report.note
    assert "each run is a whole one" in str(report).replace("\n", " ")
    expected = whole_runs(model, batches, "only")
    assert {row.name: row.value for row in report.rows} == pytest.approx(expected, rel=1e-5)


def test_a_forward_of_the_users_own_starts_in_the_middle_too() -> None:
    model, batches = prepared(Branching(), (16,))
    calls: list[int] = []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(len(batch))
        return model(batch)

    own = torchq.sensitivity(model, batches, forward=forward, progress=False)
    assert calls
    assert not own.note
    assert own.rows == torchq.sensitivity(model, batches, progress=False).rows


def test_an_error_inside_a_run_leaves_the_forwards_alone() -> None:
    model, batches = prepared(Branching(), (16,))
    before = copy.copy(vars(model.a))

    def failing(output: Tensor, batch: Tensor) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torchq.sensitivity(model, batches, failing, progress=False)
    assert vars(model.a).keys() == before.keys()
