"""Recipes of platforms: each one against its row of the table, and simulated exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.reference import affine_fake_quantize, fake_quantize
from torchq import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import IntFormat
from torchq.nn import TensorQuantizer
from torchq.runtimes import RUNTIMES

# name: activations, weights: (lowest code, highest, symmetric, powers of two, rounding), and
# whether weights have a range for each channel.
Row = tuple[float, float, bool, bool, str]
INT8: Row = (-128, 127, True, False, "half_even")
UINT8: Row = (0, 255, False, False, "half_even")
NARROW: Row = (-127, 127, True, False, "half_away")
SHIFT: Row = (-128, 127, True, True, "half_even")
TABLE: dict[str, tuple[Row, Row, bool]] = {
    "ncnn": (NARROW, NARROW, True),
    "mnn": (NARROW, NARROW, True),
    "rknn": (UINT8, UINT8, False),
    "snpe": (UINT8, UINT8, False),
    "qnn": (UINT8, INT8, True),
    "ascend": (
        (0, 255, False, False, "half_away"),
        (-128, 127, True, False, "half_away"),
        True,
    ),
    "nxp": (
        (-128, 127, True, True, "half_up"),
        (-128, 127, True, True, "half_away"),
        True,
    ),
    "fpga": (SHIFT, SHIFT, False),
}


def row(descriptor: QuantDescriptor) -> Row:
    format = descriptor.format
    bounds = format.quant_min, format.quant_max
    return (*bounds, descriptor.symmetric, descriptor.power_of_two, format.rounding)


def test_every_platform_is_in_the_table() -> None:
    assert {
        r.name for r in RUNTIMES.values() if r.recipe is not torchq.recipes.int8
    } == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_platforms_quantize_as_the_table_says(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    torchq.quantize_(model, RUNTIMES[name].recipe())
    activations, weights, per_channel = TABLE[name]
    for layer in (model[0], model[3]):
        assert row(layer.input_quantizer.descriptor) == activations
        assert row(layer.weight_quantizer.descriptor) == weights
        assert layer.input_quantizer.descriptor.axis is None
        assert layer.weight_quantizer.descriptor.axis == ((0,) if per_channel else None)
    config = RUNTIMES[name].recipe()
    assert torchq.plan(nn.Linear(4, 2), target=name).recipe == name
    assert config.name == name
    assert torchq.QuantConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("slot", ["input", "weight"])
def test_simulation_equals_the_oracle(
    name: str, slot: str, generator: torch.Generator
) -> None:
    d = getattr(RUNTIMES[name].recipe().rules[0], slot)
    q = TensorQuantizer(d.replace(axis=None))
    x = torch.randn(200, generator=generator) + 0.3
    q.calibrate_on(x)
    scale = q.scale
    # Ties, of which normal numbers have none, are where roundings differ.
    x = torch.cat([x, torch.arange(-12, 12) * scale / 2])
    assert isinstance(d.format, IntFormat)
    rules: dict[str, Any] = {"power_of_two": d.power_of_two, "rounding": d.rounding}
    for value, actual in zip(x.tolist(), q(x).tolist(), strict=True):
        if d.symmetric:
            narrow = d.format.narrow
            expected = fake_quantize(
                value, float(q.amax), 8, bool(d.unsigned), narrow, **rules
            )[1]
        else:
            assert q.amin is not None
            ends = float(q.amin), float(q.amax)
            expected = affine_fake_quantize(value, *ends, 8, bool(d.unsigned), **rules)[
                2
            ]
        assert actual == expected


def test_unknown_targets_are_named() -> None:
    for wrong, message in (
        ("tpu", r"target 'tpu'.*'tensorrt'"),
        (3, r"target: got 3; expected one"),
    ):
        with pytest.raises(ConfigError, match=message):
            torchq.quantize_(nn.Linear(4, 4), target=wrong)  # type: ignore[arg-type]


def test_asymmetric_recipes() -> None:
    for config in (
        torchq.recipes.int8(symmetric=False),
        torchq.recipes.integer(8, 8, symmetric=False),
        torchq.recipes.integer(4, 4, symmetric=False),
    ):
        for rule in config.rules:
            assert rule.input is not None
            assert rule.weight is not None
            assert not rule.input.symmetric
            assert rule.input.unsigned
            assert rule.weight.symmetric
