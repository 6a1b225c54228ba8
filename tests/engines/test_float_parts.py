"""Parts of a model stay float where they are slower on integers, and the summary says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.engines import float_parts, torch_engine
from torchq.engines.float_parts import FloatPart, partly_float, slower_parts
from torchq.engines.task import Task
from torchq.graph import forward_hook_kind
from torchq.lowering import Int8Layer
from torchq.lowering.api import simulated_copy


class Blocks(nn.Module):
    """Two blocks, a layer that is called twice, and a layer without a quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.large = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.twice = nn.Conv2d(8, 8, 1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.large(self.small(x))
        return self.norm(self.twice(self.twice(y)))


@pytest.fixture
def x() -> Tensor:
    """Return an image."""
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(x: Tensor) -> nn.Module:
    """Return a calibrated model."""
    torch.manual_seed(0)
    result = Blocks().eval()
    torchq.quantize_(result)
    torchq.calibrate(result, [x], progress=False)
    return result


def integer_layers(model: nn.Module) -> set[str]:
    """Return the names of the layers on integers."""
    return {name for name, module in model.named_modules() if isinstance(module, Int8Layer)}


def kind_of(model: nn.Module) -> str:
    """Return what computes in integers: "floats", "mixed" or "integers"."""
    names = integer_layers(model)
    if not names:
        return "floats"
    return "integers" if any(name.startswith("small") for name in names) else "mixed"


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let the block ``small`` take 2 ms on integers, every other part 1 ms, and float 1.5 ms.

    Whole models take the milliseconds under "integers", "mixed" and "floats", to be changed.
    """
    found = {"integers": 12.0, "mixed": 8.0, "floats": 10.0}

    def part(task: Task, name: str, call: object) -> FloatPart:
        return FloatPart(name, 2.0 if name.startswith("small") else 1.0, 1.5)

    def whole(model: nn.Module, example: object) -> float:
        return found[kind_of(model)] / 1000

    monkeypatch.setattr(float_parts, "_measured", part)
    monkeypatch.setattr(torch_engine, "_seconds", whole)
    return found


def test_a_model_of_slower_parts_alone_stays_float(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    monkeypatch.setattr(
        float_parts, "_measured", lambda task, name, call: FloatPart(name, 2.0, 1.0)
    )
    monkeypatch.setattr(torch_engine, "_least_milliseconds", lambda models, task: (12.0, 10.0))
    with pytest.warns(UserWarning, match="Sequential stays float: 12 ms on integers, 10 ms in fl"):
        assert not integer_layers(torchq.deploy(model, x))


def test_a_slower_part_stays_float_and_says_so(
    model: nn.Module, x: Tensor, times: dict[str, float]
) -> None:
    deployed = torchq.deploy(model, x)
    assert kind_of(deployed) == "mixed"
    [row] = [row for row in torchq.summary(deployed).layers if row.name.startswith("small")]
    assert row.kernel == "float"
    assert row.note == "stays float: 2 ms on integers, 1.5 ms in float, alone"
    with torchq.disabled(model.get_submodule("small")):
        assert torch.allclose(deployed(x), model(x), atol=0.05)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"mixed": 11.0, "integers": 10.0}, "integers"), ({"mixed": 11.0, "integers": 13.0}, "floats"),
     ({"integers": 7.9, "mixed": 1.0}, "integers")],
    ids=["integers are the best", "float is the best", "integers gain enough"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:deploy. Blocks stays float")
def test_the_best_whole_is_taken(
    model: nn.Module, x: Tensor, times: dict[str, float], change: dict[str, float], expected: str
) -> None:
    times.update(change)
    assert kind_of(torchq.deploy(model, x)) == expected


def test_parts_are_timed_with_the_inputs_of_the_example(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def least(models: list[nn.Module], call: Any) -> tuple[float, float]:
        results = [module(*call.args, **call.kwargs) for module in models]
        assert torch.allclose(*results, atol=0.05)
        seen[str(len(seen))] = [len(integer_layers(module)) for module in models]
        return 2.0, 1.0

    monkeypatch.setattr(float_parts, "_least_milliseconds", least)
    parts = slower_parts(Task(simulated_copy(model), x))
    assert {part.name.partition(".")[0] for part in parts} == {"small", "large"}
    assert list(seen.values()) == [[1, 0]] * 2


def test_a_part_that_cannot_be_deployed_alone_is_left_out(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: nn.Module) -> nn.Module:
        raise torchq.errors.ExportError("no")

    monkeypatch.setattr(float_parts, "lower_model", fail)
    assert slower_parts(Task(simulated_copy(model), x)) == []


def test_real_times_are_positive_and_the_model_is_left_alone(model: nn.Module, x: Tensor) -> None:
    simulated = simulated_copy(model)
    expected = simulated(x)
    task = Task(simulated, x)
    for part in slower_parts(task):
        assert part.integers > part.floats > 0
    mixed = partly_float(simulated, [FloatPart("large", 2.0, 1.0)])
    assert torch.equal(simulated(x), expected) and not torch.equal(mixed(x), expected)
    assert all(forward_hook_kind(module) is None for module in task.float_model.modules())
