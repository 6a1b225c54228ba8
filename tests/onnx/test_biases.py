"""Biases of integer kernels that do not fit into 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import exported as write
from tests.onnx.exported import run_file
from torchq.errors import ExportError
from torchq.onnx.ir import load_model, nodes_of, replace_stored, save_model, value_of
from torchq.onnx.qdq import pair_name, read_record, stored_weight, write_record

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


_NAME = "middle.weight_quantizer"


class Dying(nn.Module):
    """Three convolutions and two linear layers, with channels whose weights have died."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.middle = nn.Conv2d(8, 8, 3)
        self.last = nn.Conv2d(8, 8, 1)
        self.linear = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        with torch.no_grad():
            for layer in (self.middle, self.linear):
                for channel, factor in ((1, 0.0), (3, 1e-12), (5, 1e-7)):
                    layer.weight[channel] *= factor
                    layer.bias[channel] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).relu()).relu()
        x = self.last(x).relu().mean((2, 3))
        return self.head(self.linear(x).relu())


def exported(model: nn.Module, path: Path, *target: str, **options: Any) -> Tensor:
    """Write a model for a target; return the example."""
    torch.manual_seed(0)
    x = torch.rand(4, 3, 8, 8)
    write(model, x, path, *target, **options)
    return x


def recorded(path: Path) -> dict[str, list[int]]:
    """Return the raised channels by the name of the quantizer."""
    record = read_record(load_model(path)).get("raised scales", {})
    return {
        name: [int(channel) for channel in scales] for name, scales in record.items()
    }


@pytest.mark.parametrize("dynamo", [False, True])
def test_integer_kernels_compute_what_the_model_does(dynamo: bool, path: Path) -> None:
    model = Dying().eval()
    x = exported(model, path, dynamo=dynamo)
    assert recorded(path) == {_NAME: [3, 5], "linear.weight_quantizer": [3, 5]}
    with torch.no_grad():
        expected = model(x)
    actual = run_file(path, x, optimize=True)[0]
    # One code of a tensor may fall the other way; before, the outputs had nothing in common.
    torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.01)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


def test_other_channels_keep_scales_and_codes(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    model = Dying().eval()
    exported(model, path)
    with torch.no_grad():
        for layer in (model.middle, model.linear):
            layer.bias.zero_()
    torchq.export_onnx(
        model, torch.rand(4, 3, 8, 8), plain, target="onnxruntime", dynamo=False
    )
    assert recorded(plain) == {}
    one, other = (weight_in(file) for file in (path, plain))
    kept = [0, 2, 4, 6, 7]
    for actual, expected in zip(one, other, strict=True):
        assert torch.equal(actual[kept], expected[kept])
    assert not one[0][3].any()
    assert other[0][3].any()


def weight_in(path: Path) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of the second convolution."""
    weight = next(
        node
        for node in nodes_of(load_model(path), "DequantizeLinear")
        if pair_name(node) == _NAME
    )
    return value_of(weight.inputs[0]), value_of(weight.inputs[1])


def test_one_scale_for_a_tensor_becomes_one_by_channel(path: Path) -> None:
    model = Dying().eval()
    with torch.no_grad():
        model.middle.weight *= 1e-12
        model.middle.bias.copy_(torch.linspace(0, 2, 8))
    x = exported(model, path, config=torchq.recipes.int8_per_tensor())
    assert recorded(path)[_NAME] == [1, 2, 3, 4, 5, 6, 7]
    assert weight_in(path)[1].shape == (8,)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


def test_a_linear_layer_for_qnn_has_a_scale_for_each_channel(path: Path) -> None:
    model = Dying().eval()
    with torch.no_grad():
        model.linear.weight *= 1e-12
    x = exported(model, path, "qnn")
    assert len(recorded(path)["linear.weight_quantizer"]) > 1
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


def test_scales_are_as_small_as_the_bias_allows(path: Path) -> None:
    exported(Dying().eval(), path)
    node = nodes_of(load_model(path), "Conv")[1]
    of_input = value_of(node.inputs[0].producer().inputs[1])
    bias = value_of(node.inputs[2])
    assert bias[3] == 1
    numbers = bias / (of_input * weight_in(path)[1])
    assert numbers[[3, 5]].tolist() == pytest.approx([2.0**30] * 2)


def _double_the_scale(codes: Tensor, scale: Tensor) -> None:
    scale[3] *= 2


def _change_a_code(codes: Tensor, scale: Tensor) -> None:
    codes[3, 0, 0, 0] += 3


def _double_another_scale(codes: Tensor, scale: Tensor) -> None:
    scale[2] *= 2


@pytest.mark.parametrize(
    "damage", [_double_the_scale, _change_a_code, _double_another_scale]
)
def test_damaged_weights_are_found(
    damage: Callable[[Tensor, Tensor], None], path: Path
) -> None:
    model = Dying().eval()
    x = exported(model, path)
    file = load_model(path)
    weight = stored_weight(nodes_of(file, "Conv")[1].inputs[1])
    assert weight is not None
    codes, scale = (value_of(value).clone() for value in weight.inputs[:2])
    damage(codes, scale)
    replace_stored(weight.inputs[0], codes)
    replace_stored(weight.inputs[1], scale)
    save_model(file, path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    wrong = [layer.name for layer in report.layers if not layer.ok]
    assert _NAME in wrong


@pytest.mark.parametrize(
    "record", [[3], {_NAME: 3}, {_NAME: {"x": 1.0}}, {_NAME: {"99": 1.0}}]
)
def test_a_damaged_record_is_an_error_of_the_file(record: object, path: Path) -> None:
    model = Dying().eval()
    x = exported(model, path)
    file = load_model(path)
    write_record(file, **{"raised scales": record})
    save_model(file, path)
    with pytest.raises(ExportError, match=r"m\.onnx"):
        torchq.verify_onnx(model, path, [x], progress=False)
