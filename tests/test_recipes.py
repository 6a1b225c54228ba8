"""Recipes: what each does to the three kinds of layers, and that a model runs under each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq import QuantConfig, QuantDescriptor, recipes
from torchq.errors import ConfigError
from torchq.nn import QuantModule, TensorQuantizer

RECIPES = list(recipes.RECIPES)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    ).eval()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_data(name: str) -> None:
    config = recipes.by_name(name)
    assert config.name == name
    assert config == getattr(recipes, name)()
    assert QuantConfig.from_json(config.to_json()) == config
    # A model without a Linear is no error.
    assert all(rule.optional for rule in config.rules)
    assert getattr(recipes, name).__doc__


@pytest.mark.filterwarnings("ignore:.*only 5.5% of the weights of layers quantized")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run(name: str, generator: torch.Generator) -> None:
    """Before and after calibration, finite, near the float model, and different from it."""
    net = model()
    x = torch.randn(4, 3, 8, 8, generator=generator)
    expected = net(x)
    report = torchq.quantize_(net, recipes.by_name(name))
    layers = ["6"] if name == "int8_dynamic" else ["0", "3", "6"]
    assert [d.name for d in report.replaced] == layers
    for calibrated in (False, True):
        if calibrated:
            torchq.calibrate(net, [x], progress=False)
        y = net(x)
        assert bool(y.isfinite().all())
        assert not torch.equal(y, expected)
    # 4 bits are coarse; INT8 and FP8 are not.
    assert (y - expected).norm() < (0.6 if "4" in name else 0.1) * expected.norm()
    y.sum().backward()
    assert all(
        p.grad is not None for n, p in net.named_parameters() if n.endswith("weight")
    )


def axes(config: Callable[[], QuantConfig], slot: str) -> list[Any]:
    """Return the descriptors of one slot in the layers of the model."""
    net = model()
    torchq.quantize_(net, config())
    actual = (
        getattr(m, f"{slot}_quantizer") for m in net if isinstance(m, QuantModule)
    )
    return [q.descriptor if isinstance(q, TensorQuantizer) else None for q in actual]


def test_what_each_recipe_does() -> None:
    per_channel = [
        QuantDescriptor(axis=0),
        QuantDescriptor(axis=1),
        QuantDescriptor(axis=0),
    ]
    assert axes(recipes.int8, "input") == [QuantDescriptor()] * 3
    assert axes(recipes.int8, "weight") == per_channel
    assert axes(recipes.int8_per_tensor, "weight") == [QuantDescriptor()] * 3
    assert axes(recipes.fp8, "weight") == [
        d.replace(num_bits=(4, 3)) for d in per_channel
    ]
    learned = QuantDescriptor(4, learn_amax=True, scale_range_grad=True)
    middle = learned.replace(unsigned="auto", calib_method="mse")
    end = QuantDescriptor(unsigned="auto")
    assert axes(recipes.w4a4, "input") == [end, middle, end]
    assert axes(recipes.w4a4, "weight") == [
        QuantDescriptor(axis=0),
        learned.replace(axis=1, calib_method="activation"),
        QuantDescriptor(axis=0),
    ]
    assert axes(lambda: recipes.w4a4(first_last=None), "input") == [middle] * 3


def test_integer_makes_any_width() -> None:
    few = QuantDescriptor(3, unsigned="auto", calib_method="mse")
    config = recipes.integer(2, 3, first_last=6, weight_method="entropy")
    six = QuantDescriptor(6)
    assert config.name == "w2a3"
    assert axes(lambda: config, "input") == [
        six.replace(unsigned="auto"),
        few,
        six.replace(unsigned="auto"),
    ]
    assert [
        d and (d.num_bits, d.axis, d.calib_method)
        for d in axes(lambda: config, "weight")
    ] == [
        (6, (0,), "entropy"),
        (2, (1,), "entropy"),
        (6, (0,), "entropy"),
    ]
    assert recipes.integer().rules == recipes.int8().rules
    assert axes(lambda: recipes.integer(4, None), "input") == [None] * 3
    assert axes(lambda: recipes.integer(None, 8), "weight") == [None] * 3
    whole = recipes.integer(4, per_channel=False, unsigned=True)
    assert (
        axes(lambda: whole, "weight")
        == [QuantDescriptor(4, calib_method="activation")] * 3
    )
    assert axes(lambda: whole, "input") == [QuantDescriptor(unsigned=True)] * 3
    assert QuantConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        (
            (None, None),
            "recipes.integer: got neither weight_bits nor input_bits; expected one",
        ),
        ((4.0, 4), "recipes.integer: got width 4.0; expected an integer"),
        ((17, 8), "got 17 bits; expected 2 to 16"),
    ],
)
def test_widths_that_integer_refuses(widths: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        recipes.integer(*widths)


@pytest.mark.parametrize(
    ("recipe", "bits", "size", "scales"),
    [("mxfp8", (4, 3), 32, "e8m0"), ("nvfp4", (2, 1), 16, "e4m3")],
)
def test_blocks_lie_along_the_summed_axis(
    recipe: str, bits: tuple[int, int], size: int, scales: str
) -> None:
    block = QuantDescriptor(bits, block_size=size, scale_format=scales, dynamic=True)
    config = getattr(recipes, recipe)
    assert axes(config, "input") == [
        block.replace(block_axis=axis) for axis in (1, 1, -1)
    ]
    assert axes(config, "weight") == [
        block.replace(block_axis=axis) for axis in (1, 0, -1)
    ]


def test_unknown_recipe() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'int9'; expected one of: .*'int8'"
    ):
        recipes.by_name("int9")


def test_recurrent_layers_are_quantized_by_name_alone() -> None:
    layers = (nn.LSTM, nn.GRU, nn.RNN)
    net = nn.ModuleList(cls(3, 4) for cls in layers)
    for config in (recipes.int8(recurrent=True), recipes.int8_dynamic()):
        assert len(torchq.plan(net, config).replaced) == len(layers)
    for config in (recipes.int8(), recipes.w4a4()):
        with pytest.raises(ConfigError, match="nothing to quantize"):
            torchq.plan(net, config)
    rule = recipes.int8(symmetric=False, recurrent=True).rules[-1]
    assert rule.input == QuantDescriptor()
    assert rule.weight == QuantDescriptor(axis=0)
