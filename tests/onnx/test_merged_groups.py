"""Small groups of convolutions are merged for ONNX Runtime, and nothing else changes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, run_file
from torchq.errors import ExportError
from torchq.onnx.ir import (
    attribute,
    load_model,
    nodes_of,
    replace_stored,
    save_model,
    value_of,
)
from torchq.onnx.passes.channels import merge_groups, split_groups
from torchq.onnx.qdq import stored_weight, write_record

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Grouped(nn.Module):
    """A convolution in groups between two others."""

    def __init__(self, groups: int, channels: int, per_output: int = 0) -> None:
        super().__init__()
        width = groups * channels
        out = groups * (per_output or channels)
        self.first = nn.Conv2d(3, width, 1)
        self.grouped = nn.Conv2d(width, out, 3, padding=1, groups=groups)
        self.last = nn.Conv2d(out, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.grouped(self.first(x).relu()).relu())


def exported(model: nn.Module, path: Path, target: str = "onnxruntime") -> Tensor:
    """Write a model for a target; return the example."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    calibrated(model, x, target=target, example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x, path, target=target, dynamo=False)
    return x


def groups_of(path: Path) -> tuple[int, list[int]]:
    """Return the groups and the shape of the weight of the second convolution."""
    _, node, *_ = nodes_of(load_model(path), "Conv")
    weight = stored_weight(node.inputs[1])
    assert weight is not None
    return attribute(node, "group", 1), list(value_of(weight.inputs[0]).shape)


@pytest.mark.parametrize(
    ("groups", "channels", "merged", "width"),
    [
        (26, 8, 2, 104),  # 13 groups become one: 2 would be 16 channels only
        (32, 4, 4, 32),
        (6, 8, 1, 48),
        (2, 40, 2, 40),  # wide enough
        (37, 8, 37, 8),  # all together would be too wide
        (4, 2, 1, 8),
        (16, 1, 16, 1),  # depthwise
    ],
)
def test_groups_get_at_least_32_channels(
    groups: int, channels: int, merged: int, width: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    exported(Grouped(groups, channels).eval(), path)
    assert groups_of(path) == (merged, [groups * channels, width, 3, 3])


@pytest.mark.parametrize("per_output", [4, 6])
def test_the_file_computes_the_same_codes(per_output: int, tmp_path: Path) -> None:
    path, plain = tmp_path / "m.onnx", tmp_path / "plain.onnx"
    model = Grouped(8, 4, per_output).eval()
    x = exported(model, path)
    assert torchq.verify_onnx(model, path, [x, torch.randn(3, 3, 6, 6)]).ok
    file = load_model(path)
    assert split_groups(file) == []
    save_model(file, plain)
    assert groups_of(plain) == (8, [8 * per_output, 4, 3, 3])
    assert torch.equal(run_file(path, x)[0], run_file(plain, x)[0])


def test_a_weight_between_groups_is_found(tmp_path: Path) -> None:
    path, damaged = tmp_path / "m.onnx", tmp_path / "damaged.onnx"
    model = Grouped(8, 4).eval()
    x = exported(model, path)
    file = load_model(path)
    weight = stored_weight(nodes_of(file, "Conv")[1].inputs[1])
    assert weight is not None
    codes = value_of(weight.inputs[0]).clone()
    codes[0, -1] = 1
    replace_stored(weight.inputs[0], codes)
    save_model(file, damaged)
    report = torchq.verify_onnx(model, damaged, [x])
    assert [layer.name for layer in report.layers if layer.parameters] == [
        "grouped.weight_quantizer"
    ]


@pytest.mark.parametrize("groups", [0, 3, 64, "8", None])
def test_a_damaged_record_is_an_error_of_the_file(groups: object, tmp_path: Path) -> None:
    path, damaged = tmp_path / "m.onnx", tmp_path / "damaged.onnx"
    model = Grouped(8, 4).eval()
    x = exported(model, path)
    file = load_model(path)
    write_record(file, **{"merged groups": {"grouped.weight_quantizer": groups}})
    save_model(file, damaged)
    with pytest.raises(ExportError, match=r"the file \(32, 32, 3, 3\)"):
        torchq.verify_onnx(model, damaged, [x])


@pytest.mark.parametrize("target", ["openvino", "tensorrt", "qnn"])
def test_other_targets_keep_the_groups(target: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    exported(Grouped(8, 4).eval(), path, target)
    assert groups_of(path)[0] == 8


def test_weights_with_a_zero_point_keep_their_groups(tmp_path: Path) -> None:
    """Additional weights of 0 would need the code of the zero point."""
    path = tmp_path / "m.onnx"
    exported(Grouped(8, 4).eval(), path, "tensorrt")
    file = load_model(path)
    weight = stored_weight(nodes_of(file, "Conv")[1].inputs[1])
    assert weight is not None
    replace_stored(weight.inputs[2], value_of(weight.inputs[2]) + 1)
    merge_groups(file)
    assert [attribute(node, "group", 1) for node in nodes_of(file, "Conv")] == [1, 8, 1]
