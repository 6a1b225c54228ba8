"""Layers that ONNX Runtime runs faster in float stay float, and the report says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.nn import QuantModule


class Stem(nn.Module):
    """The first layers of a mobile network, and a block whose channels are concatenated."""

    def __init__(self, act: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 16, 3, 2), act
        self.primary = nn.Conv2d(16, channels, 1)
        self.cheap = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.grow, self.deep = nn.Conv2d(2 * channels, 8, 1), nn.Conv2d(8, 8, 3, groups=8)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.primary(self.act(self.stem(x))))
        x = torch.cat([x, F.relu(self.cheap(x))], 1)
        return self.last(F.relu(self.deep(F.relu(self.grow(x)))))


def float_layers(model: nn.Module, target: str = "onnxruntime", **options: object) -> set[str]:
    """Quantize the model; return the layers and activations that stay float."""
    x = torch.randn(2, 3, 15, 15)
    torchq.quantize_(model, target=target, example=x, **options)
    torchq.calibrate(model, [x], progress=False)
    return {name for name, m in model.named_children() if not isinstance(m, QuantModule)}


def test_narrow_channels_stay_float() -> None:
    model = Stem(nn.Hardswish())
    report = torchq.quantize_(model, target="onnxruntime", example=torch.randn(2, 3, 15, 15))
    reasons = {d.name: d.reason for d in report.skipped}
    assert reasons["cheap"] == "onnxruntime runs 8 channels faster in float"
    assert "deep" not in reasons  # Stands between convolutions: its channels are padded.
    assert not model.primary.quantizes_output  # What a float layer reads is not quantized.


def test_wider_channels_run_on_integers() -> None:
    assert "cheap" not in float_layers(Stem(nn.ReLU(), channels=16))


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_other_targets_quantize_it(target: str) -> None:
    assert "cheap" not in float_layers(Stem(nn.Hardswish()), target)


def test_a_layer_that_a_rule_names_is_quantized() -> None:
    rules = (torchq.Rule("cheap", input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor()),)
    config = torchq.recipes.int8().with_rules(*rules)
    assert "cheap" not in float_layers(Stem(nn.ReLU()), config=config)
