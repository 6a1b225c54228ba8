"""Layers that ONNX Runtime runs faster in float stay float, and the report says why."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn import QuantModule

X = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A stem of an image with many results, a depthwise layer behind it, and a last layer."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.act = nn.Hardswish()
        self.wise = nn.Conv2d(channels, channels, 3, groups=channels)
        self.last = nn.Conv2d(channels, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wise(self.act(self.stem(x))).relu())


def rule(name: str) -> torchq.QuantConfig:
    own = torchq.Rule(
        name, input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor()
    )
    return torchq.recipes.int8().with_rules(own)


@pytest.mark.parametrize(
    ("channels", "options", "expected"),
    [
        pytest.param(16, {"example": X}, set(), id="first layers are quantized"),
        pytest.param(16, {"example": X[:1]}, set(), id="for one image too"),
        pytest.param(8, {"target": "openvino"}, set(), id="another target"),
        pytest.param(8, {}, {"wise"}, id="narrow depthwise layer"),
        pytest.param(8, {"config": rule("wise")}, set(), id="its rule"),
    ],
)
def test_layers_that_are_faster_in_float_stay_float(
    channels: int, options: dict[str, object], expected: set[str]
) -> None:
    model = Net(channels).eval()
    report = torchq.quantize_(model, **{"target": "onnxruntime", **options})
    layers = {n: m for n, m in model.named_children() if isinstance(m, nn.Conv2d)}
    assert {n for n, m in layers.items() if not isinstance(m, QuantModule)} == expected
    for name in expected:
        why = {d.name: d.reason for d in report.skipped}[name]
        assert why.startswith("onnxruntime runs")
        assert why.endswith("faster in float")
