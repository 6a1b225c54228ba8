"""Layers that ONNX Runtime runs faster in float stay float, and the report says why."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn import QuantModule

X = torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A stem of an image, a depthwise layer behind it, and deeper layers."""

    def __init__(self, act: type[nn.Module] = nn.Hardswish, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.act = act()
        self.wise = nn.Conv2d(channels, channels, 3, groups=channels)
        self.wise_act = act()
        self.grow = nn.Conv2d(channels, 32, 1)
        self.deep = nn.Conv2d(32, 32, 3, groups=32)
        self.last = nn.Conv2d(32, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wise_act(self.wise(self.act(self.stem(x))))
        return self.last(self.deep(self.grow(x)).relu()).relu()


class Pooled(Net):
    """A stem whose result max pooling reads, behind a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.act(self.stem(x)), 2)
        return self.last(self.deep(self.grow(self.wise(x))).relu())


def float_parts(model: nn.Module) -> set[str]:
    """Return the convolutions and activations that stay float; a ReLU has no quantizer."""
    children = model.named_children()
    return {n for n, m in children if not isinstance(m, (QuantModule, nn.ReLU))}


def quantize(model: nn.Module, x: Tensor | None = X, **options: object) -> torchq.swap.Plan:
    return torchq.quantize_(model, example=x, **{"target": "onnxruntime", **options})


STEM = {"stem", "act", "wise", "wise_act"}


def rule(name: str) -> torchq.QuantConfig:
    own = torchq.Rule(name, input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor())
    return torchq.recipes.int8().with_rules(own)


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        pytest.param(Net(), {}, STEM, id="stem, activation and depthwise layer"),
        pytest.param(Net(nn.ReLU), {}, {"stem", "wise"}, id="ReLU"),
        pytest.param(Net(channels=18), {}, {"stem", "act"}, id="float is slow for 18 channels"),
        pytest.param(Pooled(), {}, set(), id="max pooling reads the stem"),
        pytest.param(Net(), {"x": X[..., :24, :24]}, set(), id="too few results"),
        pytest.param(Net(), {"x": None}, set(), id="no example"),
        pytest.param(Net(nn.ReLU), {"target": "openvino"}, set(), id="another target"),
        pytest.param(Net(), {"config": rule("stem")}, STEM - {"stem"}, id="a rule names the stem"),
        pytest.param(Net(channels=8), {"x": None}, {"wise"}, id="narrow depthwise layer"),
        pytest.param(Net(channels=8), {"x": None, "config": rule("wise")}, set(), id="its rule"),
    ],
)
def test_layers_that_are_faster_in_float_stay_float(
    model: nn.Module, options: dict[str, object], expected: set[str]
) -> None:
    report = quantize(model, **options)
    assert float_parts(model) == expected
    for name in expected:
        why = {d.name: d.reason for d in report.skipped}[name]
        assert why.startswith("onnxruntime runs") and why.endswith("faster in float")
