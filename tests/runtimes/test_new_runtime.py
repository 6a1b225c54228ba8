"""A runtime is what stands in its own folder: this file is one, and nothing else knows of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError, ExportError
from torchq.nn import QuantLinear
from torchq.runtime import PlanPass, Writer, planned_runtime
from torchq.runtimes import RUNTIMES, Codes, EngineModule, FileEngine, Placement
from torchq.runtimes.engine import Task
from torchq.runtimes.export import class_name, tensor_shapes
from torchq.runtimes.interface import (
    CallSignature,
    GraphInput,
    GraphInterface,
    ReadGraph,
    Run,
    Shapes,
    example_arguments,
    flatten,
)
from torchq.swap import Plan
from torchq.swap.facts import Facts
from torchq.swap.layers import one_weight_scale


def narrow_layers_in_float(least: int, plan: Plan, facts: Facts) -> Plan:
    """Leave layers float that return fewer numbers: a planning pass of this runtime alone."""
    calls = () if facts.flow is None else facts.flow.calls
    narrow = {
        c.name
        for c in calls
        if c.module is not None and c.shape and c.shape[-1] < least
    }
    return plan.in_float(
        dict.fromkeys(sorted(narrow), "toy has no kernel so narrow"), "toy"
    )


def written(model: nn.Sequential) -> bytes:
    """Return a file of this runtime: a list of layers, in the order in which they run."""
    rows: list[dict[str, Tensor]] = []
    for layer in model:
        if isinstance(layer, QuantLinear):
            weight = layer.weight_quantizer
            input = layer.input_quantizer
            codes = weight.codes(layer.weight)
            scales = {"scale": weight.scale, "input": input.scale}
            rows.append(
                {"codes": codes.to(torch.int8), **scales, "bias": layer.bias.detach()}
            )
        elif isinstance(layer, nn.Linear):
            rows.append({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
        else:
            rows.append({})  # a ReLU
    file = io.BytesIO()
    torch.save(rows, file)
    return file.getvalue()


def computed(row: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return what one layer of a file computes, on integers where it has codes."""
    if not row:
        return x.relu()
    if "weight" in row:
        return nn.functional.linear(x, row["weight"], row["bias"])
    codes = (x / row["input"]).round().clamp(-128, 127).to(torch.int32)
    sums = codes @ row["codes"].to(torch.int32).T
    return sums * (row["input"] * row["scale"]) + row["bias"]


def write_toy(model: nn.Module, example: Any, path: Path) -> str:
    assert isinstance(model, nn.Sequential)
    path.write_bytes(written(model))
    return "a toy"


_PLACEMENT = Placement(operators=frozenset(["add"]))
_CODES = Codes(unsigned=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class Toy(FileEngine):
    """Runs sequences of linear layers and ReLU.

    Attributes:
        wrong: its results are one too large.
    """

    name: str = "toy"
    placement: Placement | None = _PLACEMENT
    adapting: tuple[PlanPass, ...] = (
        partial(one_weight_scale, ("torch.nn.modules.linear.Linear",)),
    )
    planning: tuple[PlanPass, ...] = (partial(narrow_layers_in_float, 3),)
    codes: Codes | None = _CODES
    proved: str = "equal codes"
    wrong: bool = False

    def writers(self) -> Mapping[str, Writer]:
        return {".toy": write_toy}

    def build(self, task: Task) -> EngineModule:
        model = task.model if self.quantized else task.float_model
        assert isinstance(model, nn.Sequential)
        _, structure = flatten(task.outcome)
        parameters, _ = example_arguments(task.model, task.example)
        shapes = tensor_shapes(task.model, task.example)
        inputs = tuple(GraphInput(name, torch.float32, shape) for name, shape in shapes)
        signature = CallSignature(class_name(task.model), parameters, inputs)
        graph = torch.frombuffer(bytearray(written(model)), dtype=torch.uint8)
        module = EngineModule(
            self, graph, GraphInterface(signature, structure, (True,))
        )
        for check in task.checks if self.quantized else task.float_checks:
            if deviation := check.difference(module):
                raise ExportError(f"deploy: target {self.label!r}: {deviation}")
        return module

    def open(self, read: ReadGraph, threads: int, usual: Shapes) -> Run:
        rows = torch.load(io.BytesIO(read()), weights_only=True)

        def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
            (x,) = feeds.values()
            for row in rows:
                x = computed(row, x)
            return [x + 1 if self.wrong else x]

        return run

    def integer_share(self, module: EngineModule) -> str:
        return "all of it is a toy"


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter the runtime, which is what its line in torchq/runtimes/__init__.py would do."""
    monkeypatch.setattr(RUNTIMES, "_entries", dict(RUNTIMES._entries))
    RUNTIMES.add("toy", Toy())


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def calibrated(target: str | Toy = "toy") -> nn.Sequential:
    model = net()
    torchq.quantize_(model, target=target, example=X, progress=False)
    torchq.calibrate(model, [X], progress=False)
    return model


def test_its_own_steps_make_its_plans() -> None:
    plan = torchq.plan(net(), target="toy", example=X)
    layer, last = (plan.decision(name) for name in ("0", "2"))
    assert layer is not None
    assert layer.one_scale
    assert layer.weight.axis is None
    assert last is not None
    assert (last.reason, last.by) == (
        "toy has no kernel so narrow",
        "toy",
    )
    RUNTIMES.remove("toy")
    RUNTIMES.add("toy", replace(Toy(), planning=(), adapting=()))
    others = torchq.plan(net(), target="toy", example=X).decisions
    assert [(d.reason, d.one_scale) for d in others] == [("", False), ("", False)]


def test_it_quantizes_operators_and_has_codes_of_its_own() -> None:
    x = torch.randn(1, 4, 3, 3)
    plan = torchq.plan(
        Sums(), torchq.recipes.integer(unsigned="auto"), target="toy", example=x
    )
    (operator,) = plan.operator_rows()
    assert operator.name == "quant_add"
    assert operator.input is not None
    assert operator.input.unsigned is False  # the runtime has no unsigned codes
    assert "toy" in torchq.targets()
    assert "equal codes" in str(torchq.targets())


def test_plans_and_files_keep_it_with_its_settings(tmp_path: Path) -> None:
    model = calibrated(Toy(wrong=True))
    plan = torchq.swap.plan_of(model)
    assert plan.settings == {"wrong": True}
    assert Plan.from_dict(plan.to_dict()) == plan
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(net(), tmp_path / "model.pt")
    assert planned_runtime(loaded) == Toy(wrong=True)
    assert torch.equal(loaded(X), model(X))
    with pytest.raises(ConfigError, match=r"was quantized for 'toy'; .*restore_"):
        torchq.deploy(model, X, target="openvino")


def test_deploy_runs_its_files_and_compares_them() -> None:
    model = calibrated()
    deployed = torchq.deploy(model, X, progress=False)
    assert isinstance(deployed, EngineModule)
    assert deployed.target == "toy"
    # Products are added as integers.
    assert torch.allclose(deployed(X), model(X), atol=1e-6)
    assert "all of it is a toy" in str(torchq.summary(deployed))
    with pytest.raises(
        ExportError, match="target 'toy quantized': result 0 has relative error"
    ):
        torchq.deploy(model, X, target=Toy(wrong=True), progress=False)


def test_it_writes_files_with_an_ending_of_its_own(tmp_path: Path) -> None:
    writer = Toy().writers()[".toy"]
    assert writer(calibrated(), X, tmp_path / "model.toy") == "a toy"
    rows = torch.load(tmp_path / "model.toy", weights_only=True)
    expected = [["bias", "codes", "input", "scale"], [], ["bias", "weight"]]
    assert [sorted(row) for row in rows] == expected
