"""A fault of every kind, planted in networks of six families, is found under its name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.analysis.families import FAMILIES, Parallel, WithFunctional
from torchq import QuantDescriptor, Rule
from torchq.analysis import CHECKS, DoctorReport
from torchq.utils import set_submodule

INT8 = QuantDescriptor()


def batches(family: str) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [FAMILIES[family].batch(generator) for _ in range(2)]


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family].build().eval()


def prepared(
    model: nn.Module, family: str, *rules: Rule, fuse: bool = True, **options: Any
) -> nn.Module:
    """Return the model in INT8, with rules of one's own, calibrated."""
    data = batches(family)
    if fuse:
        torchq.fuse_(model, data[0], progress=False)
    torchq.quantize_(model, torchq.recipes.int8().with_rules(*rules), **options)
    torchq.calibrate(model, data, on_unseen="dynamic", progress=False)
    return model


@cache
def healthy_original(family: str) -> nn.Module:
    return prepared(built(family), family)


def healthy(family: str) -> nn.Module:
    return copy.deepcopy(healthy_original(family))


def examined(model: nn.Module, family: str, *targets: str) -> DoctorReport:
    return torchq.doctor(model, batches(family), targets=targets, progress=False)


@cache
def healthy_report(family: str) -> DoctorReport:
    return examined(healthy(family), family)


def found_in_healthy(family: str, kind: str) -> frozenset[str]:
    """Return the names under which a kind is found where nobody planted anything.

    Targets are left out, as exporting and deploying take long.
    """
    report = healthy_report(family)
    return frozenset(finding.name for finding in report.findings if finding.kind == kind)


TARGETS = {"export_obstacle": ("onnxruntime",), "deploy_obstacle": ("deploy",)}

# Each of these returns a model with one fault, and the name under which it is found.

Planted = tuple[nn.Module, str]


def layer_of(model: nn.Module, family: str) -> Any:
    return model.get_submodule(FAMILIES[family].layer)


def input_of(family: str) -> str:
    return f"{FAMILIES[family].layer}.input_quantizer"


def weight_of(family: str) -> str:
    return f"{FAMILIES[family].layer}.weight_quantizer"


def with_rule(family: str, **descriptors: Any) -> nn.Module:
    chosen = {"input": INT8, "weight": INT8.replace(axis=0), **descriptors}
    return prepared(built(family), family, Rule(FAMILIES[family].layer, **chosen))


def plant_unseen(family: str) -> Planted:
    model = built(family)
    model.auxiliary = nn.Linear(4, 2)
    return prepared(model, family), "auxiliary.input_quantizer"


def plant_uncalibrated(family: str) -> Planted:
    model = healthy(family)
    layer_of(model, family).input_quantizer.forget_amax()
    return model, input_of(family)


def plant_dynamic_range(family: str) -> Planted:
    return with_rule(family, input=INT8.replace(dynamic=True)), input_of(family)


def plant_zero_range(family: str) -> Planted:
    model = healthy(family)
    layer_of(model, family).input_quantizer.set_amax(0.0)
    return model, input_of(family)


def plant_nan_range(family: str) -> Planted:
    model = healthy(family)
    layer_of(model, family).weight_quantizer.amax[1] = math.nan
    return model, weight_of(family)


def plant_learned_range(family: str) -> Planted:
    model = with_rule(family, input=INT8.replace(learn_amax=True))
    with torch.no_grad():
        layer_of(model, family).input_quantizer.amax.fill_(-0.1)
    return model, input_of(family)


def plant_skewed_range(family: str) -> Planted:
    model = healthy(family)
    quantizer = layer_of(model, family).input_quantizer
    quantizer.set_amax(float(quantizer.amax) * 50)
    return model, input_of(family)


def plant_narrow_range(family: str) -> Planted:
    model = healthy(family)
    quantizer = layer_of(model, family).input_quantizer
    quantizer.set_amax(float(quantizer.amax) / 20)
    return model, input_of(family)


def plant_wrong_order(family: str) -> Planted:
    model = healthy(family)
    with torch.no_grad():
        layer_of(model, family).weight.mul_(3)
    return model, weight_of(family)


def plant_skipped_layer(family: str) -> Planted:
    layer = FAMILIES[family].layer
    return prepared(built(family), family, exclude=[layer]), layer


def plant_switched_off(family: str) -> Planted:
    model = healthy(family)
    layer_of(model, family).weight_quantizer.mode = "off"
    return model, weight_of(family)


def plant_functional_call(family: str) -> Planted:
    model, layer = built(family), FAMILIES[family].layer
    torchq.fuse_(model, batches(family)[0], progress=False)
    set_submodule(model, layer, WithFunctional(model.get_submodule(layer)))
    return prepared(model, family, fuse=False), layer


def plant_one_sided_add(family: str) -> Planted:
    branch = FAMILIES[family].branch
    if not branch:
        pytest.skip("no residual addition")
    model = built(family)
    torchq.fuse_(model, batches(family)[0], progress=False)
    set_submodule(model, branch, torchq.TensorQuantizer())
    where = {
        "resnet": "layer2.1",
        "mobilenet": "features.4",
        "segmentation": "backbone.3",
        "vision transformer": "encoder.layers.encoder_layer_1",
        "text encoder": "blocks.1",
    }
    return prepared(model, family, fuse=False), where[family]


def plant_weight_axis(family: str) -> Planted:
    place = FAMILIES[family].transposed or FAMILIES[family].layer
    axis = 0 if FAMILIES[family].transposed else 1
    rule = Rule(place, input=INT8, weight=INT8.replace(axis=axis))
    return prepared(built(family), family, rule), f"{place}.weight_quantizer"


def plant_range_spread(family: str) -> Planted:
    model = built(family)
    with torch.no_grad():
        layer_of(model, family).weight[1] *= 100
    rule = Rule(FAMILIES[family].layer, input=INT8, weight=INT8)
    return prepared(model, family, rule), weight_of(family)


def plant_batchnorm_left(family: str) -> Planted:
    if not FAMILIES[family].norm:
        pytest.skip("no BatchNorm")
    return prepared(built(family), family, fuse=False), FAMILIES[family].norm


def plant_differing_ranges(family: str) -> Planted:
    model, layer = built(family), FAMILIES[family].layer
    torchq.fuse_(model, batches(family)[0], progress=False)
    found = model.get_submodule(layer)
    set_submodule(model, layer, Parallel(found, copy.deepcopy(found)))
    model = prepared(model, family, fuse=False)
    quantizer: Any = model.get_submodule(f"{layer}.second.input_quantizer")
    quantizer.set_amax(float(quantizer.amax) * 0.9)
    return model, f"{layer}.first.input_quantizer"


def plant_export_obstacle(family: str) -> Planted:
    return with_rule(family, input=INT8.replace(dynamic=True)), input_of(family)


def plant_deploy_obstacle(family: str) -> Planted:
    wide = QuantDescriptor(16)
    model = with_rule(family, input=wide, weight=wide.replace(axis=0))
    return model, FAMILIES[family].layer


PLANTED: dict[str, Callable[[str], Planted]] = {
    name.removeprefix("plant_"): function
    for name, function in list(globals().items())
    if name.startswith("plant_")
}


def test_every_kind_is_planted() -> None:
    assert sorted(PLANTED) == sorted(CHECKS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found_by_name(kind: str, family: str) -> None:
    if kind == "export_obstacle":
        pytest.importorskip("onnx")
    torch.manual_seed(1)
    model, name = PLANTED[kind](family)
    report = examined(model, family, *TARGETS.get(kind, ()))
    found = [finding for finding in report.findings if finding.kind == kind]
    assert name in [finding.name for finding in found], str(report)
    assert name not in found_in_healthy(family, kind)
    assert all(finding.remedy and finding.evidence for finding in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_networks_have_no_error(family: str) -> None:
    report = healthy_report(family)
    assert report.errors == report.of("warning") == (), str(report)
    # Random networks may have channels of zeros; nothing else is to be said about them.
    assert {finding.kind for finding in report.findings} <= {"zero_range"}


def test_obstacles_of_deploy_do_not_depend_on_the_time_that_layers_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("torchq.engines.torch_engine._least_milliseconds")
    model, name = plant_deploy_obstacle("resnet")
    report = examined(model, "resnet", *TARGETS["deploy_obstacle"])
    found = [finding.name for finding in report.findings if finding.kind == "deploy_obstacle"]
    assert found == [name]
