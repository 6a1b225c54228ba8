"""Formats layer by layer: the best choice, its budget, its groups, and the front."""

import itertools
import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, Parts, image_batches, simulated
from torchq.analysis.mixed_precision import Problem
from torchq.errors import ConfigError


def network() -> nn.Sequential:
    torch.manual_seed(4)
    parts: list[nn.Module] = []
    for inputs, outputs in ((12, 32), (32, 8), (8, 24)):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(24, 10))


def vectors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(64, 12, generator=generator) for _ in range(2)]


def planned(**options: Any) -> torchq.analysis.MixedPrecision:
    options = {
        "budget": {"mean_bits": 5},
        "formats": [3, 4, 6, 8],
        "progress": False,
        **options,
    }
    return torchq.mixed_precision(network(), vectors(), **options)


@cache
def usual() -> torchq.analysis.MixedPrecision:
    return planned()


@pytest.mark.parametrize("seed", range(30))
def test_the_solution_is_the_best_of_all(seed: int) -> None:
    """Compare with trying every choice."""
    generator = torch.Generator().manual_seed(seed)
    damages, bits, work = (
        torch.rand(5, 3, generator=generator).tolist() for _ in range(3)
    )
    damages[2][1] = math.inf
    rows = [torch.tensor(rows, dtype=torch.float64) for rows in (damages, bits, work)]
    problem = Problem(
        rows[0],
        {"bits": rows[1], "work": rows[2]},
    )
    budget = {"bits": 2.2, "work": 2.6}
    allowed = {}
    for choice in itertools.product(range(3), repeat=5):
        costs = [sum(rows[g][f] for g, f in enumerate(choice)) for rows in (bits, work)]
        if costs[0] <= budget["bits"] and costs[1] <= budget["work"]:
            allowed[choice] = sum(damages[g][f] for g, f in enumerate(choice))
    allowed = {
        choice: damage for choice, damage in allowed.items() if damage < math.inf
    }
    actual = problem.solve(budget)
    if not allowed:
        assert actual is None
        return
    assert actual is not None
    assert tuple(actual) == min(allowed, key=allowed.__getitem__)
    assert problem.figures(actual)[0] == pytest.approx(min(allowed.values()))


def test_the_config_is_within_its_budget_and_quantizes_as_it_says() -> None:
    config = usual()
    assert config.costs["mean_bits"] <= 5
    model = simulated(network(), vectors(), config)
    total = bits = 0
    for choice in config.choices:
        layer = model.get_submodule(choice.name)
        assert layer.weight_quantizer.descriptor.num_bits == choice.weight_bits
        assert layer.input_quantizer.descriptor.num_bits == choice.input_bits
        total += layer.weight.numel()
        bits += layer.weight.numel() * choice.weight_bits
    assert config.costs["mean_bits"] == pytest.approx(bits / total)
    assert config.costs["bytes"] == bits / 8
    again = torchq.QuantConfig.from_json(config.to_json())
    assert again.rules == config.rules


@pytest.mark.slow
def test_more_budget_does_less_damage() -> None:
    damages = [planned(budget={"mean_bits": bits}).damage for bits in (3, 4, 5, 6, 8)]
    assert damages == sorted(damages, reverse=True)
    assert damages[0] > damages[-1]
    front = usual().front
    costs = [point.costs["mean_bits"] for point in front]
    assert costs == sorted(costs)
    assert [p.damage for p in front] == sorted((p.damage for p in front), reverse=True)
    assert len(front) >= 4
    assert set(front[0].formats.values()) == {"w3a3"}


def test_bounds_hold_together() -> None:
    one = planned(budget={"mean_bits": 6})
    both = planned(
        budget={"mean_bits": 6, "bit_operations": one.costs["bit_operations"] * 0.8}
    )
    assert both.costs["mean_bits"] <= 6
    assert both.costs["bit_operations"] <= one.costs["bit_operations"] * 0.8 * (
        1 + 1e-6
    )
    assert both.damage > one.damage


def test_bit_operations_count_multiplications_of_one_input() -> None:
    config = planned(formats=[8], budget={"bit_operations": 1e12})
    products = sum(m.weight.numel() for m in network() if isinstance(m, nn.Linear))
    assert config.costs["bit_operations"] == products * 64


@pytest.mark.parametrize("metric", ["sqnr", "fisher"])
def test_every_metric_ranks_formats(metric: str) -> None:
    config = planned(metric=metric)
    assert config.metric == metric
    assert 0 < config.damage < math.inf


def test_models_without_classes_are_measured() -> None:
    class Twice(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    config = torchq.mixed_precision(
        Twice(a=nn.Linear(12, 1)),
        vectors(),
        budget={"bytes": 100},
        formats=[4, 8],
        progress=False,
    )
    assert config.metric == "sqnr"
    assert config.choices[0].format == "w8a8"


def test_a_quantized_model_is_taken_as_float_and_left_alone() -> None:
    model = simulated(ConvNet().eval(), image_batches())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = torchq.mixed_precision(
        model,
        image_batches(),
        budget={"bytes": 1e9},
        formats=["w8a8", "w4"],
        exclude=["head"],
        progress=False,
    )
    assert [c.name for c in config.choices] == ["stem.0", "left.0", "right.0"]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


def test_the_plan_prints_and_serialises() -> None:
    config = usual()
    *rows, ending = str(config).splitlines()
    assert ending.endswith(f"predicted damage {config.damage:.2e}")
    assert [row.split()[-1] for row in rows[1:]] == [
        f"{c.damage:.2e}" for c in config.choices
    ]
    data = json.loads(json.dumps(config.summary()))
    assert len(data["choices"]) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": {"mean_bits": 2}}, "expected at least mean_bits=3"),
        ({"budget": {"bits": 2}}, "got budget 'bits'; expected one of mean_bits"),
        ({"budget": {"bytes": 0}}, "got bytes=0; expected a positive number"),
        ({"budget": {}}, "expected a mapping such as"),
        ({"formats": [object()]}, "expected a name such as 'w4a8'"),
        ({"formats": ["int9"]}, "expected one of"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        planned(**options)


class Projections(nn.Module):
    """Attention whose projections read one tensor, two of them through equal views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        key = self.key(x.view(-1, 16))
        value = self.value(x.view(-1, 16))
        weights = (self.query(x) @ key.T).softmax(-1)
        return self.last(weights @ value)


def of_projections(**options: Any) -> dict[str, torchq.analysis.LayerChoice]:
    torch.manual_seed(4)
    options = {
        "budget": {"mean_bits": 5},
        "formats": [3, 4, 6, 8],
        "progress": False,
        **options,
    }
    config = torchq.mixed_precision(Projections(), vectors(), **options)
    return {choice.name: choice for choice in config.choices}


@pytest.mark.parametrize("forward", [None, lambda model, batch: model(batch)])
def test_layers_that_read_one_tensor_have_one_format(forward: Any) -> None:
    actual = of_projections(forward=forward)
    projections = [actual[name] for name in ("query", "key", "value")]
    assert len({choice.format for choice in projections}) == 1
    assert len({choice.group for choice in projections}) == 1
    assert len({choice.group for choice in actual.values()}) == 3


@pytest.mark.parametrize("metric", ["sqnr", "fisher"])
def test_all_formats_are_judged_on_one_draw_of_random_numbers(metric: str) -> None:
    draws: list[float] = []

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(())
            draws.append(float(noise))
            y: Tensor = self.last(self.first(x).relu() + noise)
            return y

    options: dict[str, Any] = {
        "budget": {"mean_bits": 6},
        "formats": [8, 4],
        "progress": False,
    }
    torchq.mixed_precision(
        Noisy().eval(),
        [torch.ones(4, 8)],
        metric=metric,
        **options,
    )
    assert len(draws) > 4
    assert len(set(draws)) == 1
