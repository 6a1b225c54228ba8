"""Deployed layers with zero points of asymmetric ranges, and what deployment leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.lowering.layer import Int8Layer
from torchq.lowering.qparams import QParams
from torchq.nn import TensorQuantizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()


def images(generator: torch.Generator) -> Tensor:
    return torch.rand(4, 3, 12, 12, generator=generator) * 3 - 0.6


def quantized(generator: torch.Generator, **fields: Any) -> nn.Module:
    model = net()
    input = QuantDescriptor(**{"symmetric": False, **fields})
    weight = QuantDescriptor(axis=0, power_of_two=bool(fields.get("power_of_two")))
    rules = [Rule(f"type:{t}", input=input, weight=weight) for t in ("Conv2d", "Linear")]
    torchq.quantize_(model, QuantConfig(tuple(rules)))
    torchq.calibrate(model, [images(generator)], progress=False)
    return model


@pytest.mark.parametrize(
    "fields",
    [{"unsigned": True}, {"unsigned": False}, {"num_bits": 5}, {"power_of_two": True}],
    ids=str,
)
def test_integer_layers_compute_the_simulation(
    fields: dict[str, Any], generator: torch.Generator
) -> None:
    model, x = quantized(generator, **fields), images(generator)
    deployed = torchq.deploy(model, x)
    layers = [m for m in deployed.modules() if isinstance(m, Int8Layer)]
    assert len(layers) == 3
    zero_points = {layer.input_qparams.zero_point for layer in layers}
    assert not zero_points <= {0, 128}
    # float32 sums in another order than the simulation's: a code may differ, not more.
    limit = 2 * float(model[6].input_quantizer.scale)
    assert float((deployed(x) - model(x)).detach().abs().max()) < limit


@pytest.mark.parametrize("zero_point", range(0, 256, 51))
def test_codes_equal_the_simulation_at_ties(zero_point: int) -> None:
    q = TensorQuantizer(QuantDescriptor(unsigned=True, symmetric=False))
    # With the scale 1 every half is a tie.
    q.set_range(-float(zero_point), 255.0 - zero_point)
    qparams = QParams.of(q)
    assert qparams == QParams(1.0, zero_point, 0, 255)
    x = torch.arange(-600, 600) / 2
    codes = qparams.quantize(x)
    assert codes.dtype is torch.uint8
    assert torch.equal(qparams.dequantize(codes), q(x))


def test_dead_ranges_are_exact_zeros() -> None:
    q = TensorQuantizer(QuantDescriptor(symmetric=False, amin=0.0, amax=0.0))
    assert QParams.of(q) == QParams(1.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rounding": "half_away"}, "activations are rounded half_away"),
        ({"delegate": lambda x, quantizer: x}, "a quantizer has a delegate"),
    ],
    ids=["rounding", "delegate"],
)
def test_what_no_kernel_computes_stays_simulated(
    changes: dict[str, Any], reason: str, generator: torch.Generator
) -> None:
    model, x = quantized(generator), images(generator)
    q = model.get_submodule("0.input_quantizer")
    if "delegate" in changes:
        q.delegate = changes["delegate"]
    else:
        q.descriptor = q.descriptor.replace(**changes)
    deployed = torchq.deploy(model, x)
    rows = {row.name: row for row in torchq.summary(deployed).layers}
    assert any(reason in row.note for row in rows.values())
    limit = 2 * float(model[6].input_quantizer.scale)
    assert float((deployed(x) - model(x)).detach().abs().max()) < limit


@pytest.mark.filterwarnings("ignore:.* only .* quantized")
def test_asymmetric_weights_stay_simulated(generator: torch.Generator) -> None:
    model, x = net(), images(generator)
    weight = QuantDescriptor(axis=0, symmetric=False)
    torchq.quantize_(
        model, QuantConfig((Rule("type:Linear", input=QuantDescriptor(), weight=weight),))
    )
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x)
    notes = [row.note for row in torchq.summary(deployed).layers]
    assert any("weight ranges are asymmetric" in note for note in notes)
    assert torch.allclose(deployed(x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* only .* quantized")
def test_rounded_weights_are_deployed(generator: torch.Generator) -> None:
    model, x = net(), images(generator)
    weight = QuantDescriptor(axis=0, rounding="half_away", power_of_two=True)
    torchq.quantize_(
        model, QuantConfig((Rule("type:Linear", input=QuantDescriptor(), weight=weight),))
    )
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x)
    assert any(isinstance(m, Int8Layer) for m in deployed.modules())
    assert torch.allclose(deployed(x), model(x), atol=1e-5)
