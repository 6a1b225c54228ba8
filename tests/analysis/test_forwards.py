"""The values of a ranking are those of separate runs, whatever a forward does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchq

WIDTH = 24


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


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
def whole_runs(model: nn.Module, batches: list[Tensor]) -> dict[str, float]:
    """Return the ratio of every layer, each measured by running the whole model."""
    layers = [n for n, m in model.named_modules() if isinstance(m, torchq.nn.QuantModule)]
    found = {}
    for name in layers:
        others = [other for other in layers if other != name]
        signal = noise = 0.0
        for batch in batches:
            with torchq.disabled(model):
                expected = model(batch).double()
            with torchq.disabled(model, [f"{other}.*_quantizer" for other in others]):
                noise += float((model(batch).double() - expected).square().sum())
            signal += float(expected.square().sum())
        found[name] = float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))
    return found


@pytest.mark.parametrize("kind", [InPlace, Shared, OfPairs, Routed])
@pytest.mark.parametrize("sizes", [(16, 16), (4, 16, 5, 32)])
def test_values_are_those_of_whole_runs(kind: type[nn.Module], sizes: tuple[int, ...]) -> None:
    model, batches = prepared(kind(), sizes)
    if kind is Routed and len(sizes) == 2:
        batches = [batches[0], batches[1], batches[0][:5]]  # A layer is reached by the last alone.
    report = torchq.sensitivity(model, batches, progress=False)
    values = whole_runs(model, batches)
    assert {row.name: row.value for row in report.rows} == pytest.approx(values, rel=1e-5)
    ordered = [row.value for row in report.rows]
    assert ordered == sorted(ordered)
