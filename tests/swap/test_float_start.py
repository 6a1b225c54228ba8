"""A target that runs the first layers of a network faster in float leaves them float."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn import QuantModule, TensorQuantizer
from torchq.onnx.targets.onnxruntime import ONNXRUNTIME
from torchq.swap import Target
from torchq.swap.flow.float_start import float_start

PIXELS = 96


class Net(nn.Module):
    """A stem of 27 products for each result, a layer of 16, and deep layers of 576."""

    def __init__(self, act: type[nn.Module], kernel: int = 3, pool: bool = False) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 16, kernel, padding=kernel // 2), act()
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.grow, self.act2 = nn.Conv2d(16, 64, 1, stride=2), act()
        self.deep, self.act3 = nn.Conv2d(64, 64, 3, stride=2), act()
        self.last = nn.Conv2d(64, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act2(self.grow(self.pool(self.act(self.stem(x)))))
        return self.last(self.act3(self.deep(x)))


class Squeezed(nn.Module):
    """A stem whose result is scaled by what a narrow branch computes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 32, 3, padding=1), nn.SiLU()
        self.squeeze, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 32, 1)
        self.deep = nn.Conv2d(32, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        return self.deep(x * self.gate(self.squeeze(x)).sigmoid())


class Repeated(nn.Module):
    """A layer that is called early, on many elements, and again late."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.act, self.deep = nn.SiLU(), nn.Conv2d(16, 16, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.again(self.act(self.stem(x))))
        return self.again(self.deep(x))


class Transformer(nn.Module):
    """A stem of patches, and blocks of linear layers with additions behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, stride=4)
        self.wide = nn.ModuleList(nn.Linear(64, 256) for _ in range(12))
        self.narrow = nn.ModuleList(nn.Linear(256, 64) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(wide(x).relu())
        return x


def quantize(model: nn.Module, pixels: int = PIXELS, **options: object) -> torchq.swap.SwapReport:
    x = torch.randn(1, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    return torchq.quantize_(model, example=x, **{"target": "onnxruntime", **options})


def float_parts(model: nn.Module) -> set[str]:
    """Return the convolutions and activations that stay float."""
    return {
        name
        for name, m in model.named_modules()
        if isinstance(m, (nn.Conv2d, nn.SiLU, nn.Hardswish)) and not isinstance(m, QuantModule)
    }


def test_what_linear_layers_save_counts() -> None:
    model = Transformer().eval()
    report = quantize(model)
    assert not [d.path for d in report.decisions if "faster in float" in d.reason]
    assert all(isinstance(m, QuantModule) for m in (*model.wide, *model.narrow))


def test_layers_of_many_results_and_few_products_stay_float() -> None:
    model = Net(nn.SiLU)
    report = quantize(model)
    assert float_parts(model) == {"stem", "act", "grow", "act2"}
    reasons = {d.name: d.reason for d in report.skipped}
    text = "onnxruntime runs the first layers, up to act2, faster in float"
    assert reasons == dict.fromkeys(["stem", "act", "grow", "act2"], text)


def test_layers_whose_activation_costs_nothing_run_on_integers() -> None:
    model = Net(nn.ReLU, kernel=1)
    quantize(model)
    assert float_parts(model) == {"stem"}


def test_a_stem_with_many_products_runs_on_integers() -> None:
    model = Net(nn.ReLU, kernel=7)
    quantize(model)
    assert not float_parts(model)


def test_less_than_ten_microseconds_are_not_worth_it() -> None:
    model = Net(nn.SiLU)
    quantize(model, pixels=20)
    assert not float_parts(model)


def test_max_pooling_stands_on_one_side_with_both_its_neighbours() -> None:
    """Quantizers beside it would be moved in front of it, where codes have no fast kernel."""
    model = Net(nn.ReLU, pool=True)
    quantize(model)
    assert float_parts(model) == {"stem", "grow"}
    assert not isinstance(model.pool, QuantModule)


def test_a_value_that_is_read_again_counts_where_integers_begin() -> None:
    """Inside the branch only a few elements would change, but the product reads the stem too."""
    model = Squeezed()
    report = quantize(model)
    skipped = {d.name for d in report.skipped}
    assert skipped == {"stem", "act"}
    assert isinstance(model.squeeze, QuantModule) and isinstance(model.deep, QuantModule)


@pytest.mark.parametrize(("channels", "stays"), [(32, True), (30, False)])
def test_depthwise_channels_in_no_multiple_of_four_run_on_integers(
    channels: int, stays: bool
) -> None:
    """The float kernel for other numbers is the slow one; on integers they are padded."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.SiLU(),
        nn.Conv2d(channels, 8, 9),
    )
    quantize(model)
    assert isinstance(model[2], QuantModule) is not stays


def test_a_layer_that_is_called_again_runs_on_integers() -> None:
    model = Repeated()
    quantize(model)
    assert float_parts(model) == {"stem", "act"}


def test_a_layer_that_a_rule_names_runs_on_integers() -> None:
    model = Net(nn.SiLU)
    rule = torchq.Rule("stem", input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor())
    quantize(model, config=torchq.recipes.int8().with_rules(rule))
    assert float_parts(model) == {"act", "grow", "act2"}


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_other_targets_quantize_them(target: str) -> None:
    model = Net(nn.Hardswish)
    quantize(model, target=target)
    assert not any(isinstance(m, nn.Conv2d) for m in map(model.get_submodule, float_parts(model)))


def test_without_an_example_nothing_is_known() -> None:
    model = Net(nn.SiLU)
    torchq.quantize_(model, target="onnxruntime")
    assert not float_parts(model)


def quantized_for(target: Target, model: nn.Module) -> dict[str, str]:
    """Return what stays float with another target, of a model that is quantized throughout."""
    report = torchq.quantize_(model, target="openvino")
    return float_start(model, report.decisions, target, torch.randn(1, 3, PIXELS, PIXELS))


def test_the_run_leaves_no_trace() -> None:
    model = Net(nn.SiLU, kernel=1).train()
    report = torchq.quantize_(model, target="openvino")
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    quantizers[0].mode = "off"
    before = [q.mode for q in quantizers]
    assert float_start(model, report.decisions, ONNXRUNTIME, torch.randn(1, 3, PIXELS, PIXELS))
    assert [q.mode for q in quantizers] == before
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_gains_decide() -> None:
    assert ONNXRUNTIME.integer_gains is not None
    slow = dataclasses.replace(ONNXRUNTIME.integer_gains, product=0.0)
    target = dataclasses.replace(ONNXRUNTIME, integer_gains=slow)
    assert quantized_for(target, Net(nn.ReLU)).keys() == {"stem", "grow", "deep"}
    fast = dataclasses.replace(slow, image_product=1.0)
    assert not quantized_for(dataclasses.replace(target, integer_gains=fast), Net(nn.ReLU))
    assert not quantized_for(dataclasses.replace(target, integer_gains=None), Net(nn.ReLU))
