"""``keep="pays"``: groups that gain no time go back to float, by a clock that is made up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.runtimes import RUNTIMES, Pays, speed
from torchq.runtimes.pays import groups_of
from torchq.swap import Plan, apply_, plan_of


class Waves(nn.Module):
    """Layers, one of them depthwise, and an addition of what is computed in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3)
        self.wise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.point = nn.Conv2d(64, 64, 1)
        self.last = nn.Conv2d(64, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.wise(self.stem(x)))
        return self.last(torch.exp(x) + torch.cos(x))


X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
#: Seconds of an operator in float and on integers.
Costs = dict[str, tuple[float, float]]
COSTS: Costs = {"Conv": (3.0, 1.0), "depthwise": (1.0, 1.0), "Add": (1.0, 2.0)}


def clock(costs: Costs, seen: list[Path] | None = None) -> Callable[[Path], float]:
    """Return a function that gives a file the sum of the costs of its operators."""

    def seconds(path: Path) -> float:
        if seen is not None:
            seen.append(path)
        graph = onnx.load(path).graph
        coded = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
        total = 0.0
        for node in graph.node:
            groups = [a.i for a in node.attribute if a.name == "group"]
            kind = "depthwise" if groups and groups[0] > 1 else node.op_type
            on_integers = coded.issuperset(node.input[:2])
            total += costs.get(kind, (0.0, 0.0))[on_integers]
        return total

    return seconds


@cache
def planned(**changed: tuple[float, float]) -> Plan:
    torch.manual_seed(0)
    keep = Pays(time=clock(COSTS | changed))
    return torchq.plan(Waves().eval(), target="onnxruntime", example=X, keep=keep)


def in_float(plan: Plan) -> set[str]:
    return {decision.name for decision in plan.skipped}


def test_operators_that_lose_time_stay_float() -> None:
    plan = planned()
    assert in_float(plan) == {"quant_add"}
    assert {d.name for d in plan.replaced} == {"stem", "wise", "point", "last"}


def test_the_plan_says_what_decided_and_how_long_a_call_takes() -> None:
    plan = planned()
    assert "with Add on integers and" in plan.explain("quant_add")
    assert "decided by pays" in plan.explain("quant_add")
    assert plan.timing == "onnxruntime: 1.1e+04 ms in float, 7e+03 ms quantized"
    assert plan.timing in str(plan)
    assert Plan.from_dict(plan.to_dict()).timing == plan.timing


@pytest.mark.slow
def test_layers_go_back_alone_where_they_lose() -> None:
    plan = planned(depthwise=(1.0, 5.0))
    assert "wise" in in_float(plan)
    assert "stem" not in in_float(plan)


def test_float_is_an_answer() -> None:
    plan = planned(Conv=(1.0, 1.0))
    assert not plan.replaced
    assert "integers gain nothing" in plan.explain("stem")


def test_float_is_an_answer_where_ranges_are_shared() -> None:
    """A plan that leaves all in float names no quantizer, so it can be carried out."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
    ).eval()
    expected = model(X)
    assert torchq.plan(model, target="onnxruntime", example=X).shared
    keep = Pays(time=clock({"Conv": (1.0, 1.0)}))
    plan = torchq.quantize_(
        model, target="onnxruntime", example=X, keep=keep, progress=False
    )
    assert not plan.replaced
    assert not plan.shared
    assert torch.equal(model(X), expected)


@pytest.mark.slow
def test_where_all_gains_all_stays() -> None:
    plan = planned(depthwise=(3.0, 1.0), Add=(3.0, 1.0))
    assert not plan.skipped


@pytest.mark.parametrize(
    ("layer", "is_open"), [((3.0, 1.0), True), ((3.0, 3.0), False)]
)
def test_operators_without_which_nothing_pays_stay_on_integers(
    layer: tuple[float, float], is_open: bool
) -> None:
    """Calibration looks at the outputs alone, and would leave a plan that takes more than float."""
    plan = planned(Conv=layer, Add=(3.0, 1.0))
    (decision,) = (d for d in plan.replaced if d.name == "quant_add")
    assert decision.optional is is_open
    assert ("calibration keeps it" in plan.explain("quant_add")) is not is_open


def test_the_plan_can_be_carried_out() -> None:
    plan = planned()
    torch.manual_seed(0)
    model = Waves().eval()
    apply_(model, plan, X)
    torchq.calibrate(model, [X], progress=False)
    assert plan_of(model).outcome() == plan.outcome()
    assert not hasattr(model, "quant_add")


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model = Waves().train()
    before = copy.deepcopy(model.state_dict())
    keep = Pays(time=clock(COSTS))
    torchq.plan(model, target="onnxruntime", example=X, keep=keep)
    assert all(torch.equal(value, before[k]) for k, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert type(model.stem) is nn.Conv2d


def test_after_the_limit_no_file_is_made() -> None:
    seen: list[Path] = []
    keep = Pays(time=clock(COSTS, seen), limit=0.0)
    torchq.plan(Waves().eval(), target="onnxruntime", example=X, keep=keep)
    assert len({path.name for path in seen}) == 2  # the float model and all of the plan


def test_groups() -> None:
    model = Waves().eval()
    plan = torchq.plan(model, target="onnxruntime", example=X)
    groups = {group.label: group.paths for group in groups_of(model, plan)}
    assert groups == {
        "Add": ("quant_add",),
        "depthwise convolutions": ("wise",),
        "small layers": ("last",),
    }


def test_parts_of_larger_models_hold_neighbours() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    plan = torchq.plan(model, target="onnxruntime", example=torch.ones(1, 8))
    groups = {group.label: group.paths for group in groups_of(model, plan)}
    assert groups["part 1 of 4"] == ("0", "1")
    assert groups["part 4 of 4"] == ("6", "7", "8")
    assert "depthwise convolutions" not in groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example": X}, r'keep="pays": got no target; expected one, .*Pass target='),
        ({"target": "onnxruntime"}, r'keep="pays": got no example; expected one'),
        (
            {"target": "tensorrt", "example": X},
            r"the runtime 'tensorrt' cannot be timed here; .*Pass time=, a function",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torchq.plan(Waves().eval(), keep="pays", **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_times_that_are_none_are_refused(value: float) -> None:
    keep = Pays(time=lambda path: value)
    with pytest.raises(ConfigError, match=r"time: got .*expected the seconds"):
        torchq.plan(Waves().eval(), target="onnxruntime", example=X, keep=keep)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="unknown keep 'fast'; expected one of: 'pays'"
    ):
        torchq.plan(Waves().eval(), target="onnxruntime", example=X, keep="fast")


@pytest.mark.slow
def test_a_runtime_of_this_machine_is_timed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    plan = torchq.plan(
        model, target="onnxruntime", example=torch.ones(1, 64), keep="pays"
    )
    assert plan.timing.startswith("onnxruntime: ")


def test_a_runtime_that_is_not_registered() -> None:
    """A runtime of a user is given as an object, and no name finds it."""
    toy = replace(RUNTIMES["onnxruntime"], name="toy")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.ones(2, 8)
    keep = Pays(time=lambda path: 1 + (b"Quantize" not in path.read_bytes()))
    plan = torchq.quantize_(model, target=toy, example=x, keep=keep, progress=False)
    assert plan.timing == "toy: 2e+03 ms in float, 1e+03 ms quantized"
    torchq.calibrate(model, [x], progress=False)
    twin = copy.deepcopy(model)
    assert speed(twin, x, lambda path: 1.0).target == "toy"
    torchq.restore_(twin)
    with pytest.raises(ConfigError, match="got no target"):
        speed(twin, x, lambda path: 1.0)


def test_the_speed_of_a_calibrated_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.ones(2, 8)
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x], progress=False)
    with torch.inference_mode():
        actual = speed(
            model, x, lambda path: 1 + (b"Quantize" not in path.read_bytes())
        )
    assert actual.gain == 2.0
    assert actual.is_faster
    assert str(actual).startswith("onnxruntime: 1e+03 ms, float 2e+03 ms (2.00x); ")
    assert "one call of (2, 8) on 1 thread" in str(actual)
    assert actual.bytes[0] > 0
    assert actual.bytes[1] > 0
    assert not speed(model, x, lambda path: 1.0).is_faster
