"""Zeros that convolutions of a file add themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import calibrated, run_file
from tests.onnx.padded import Pad, exported, images, pads
from torchq.errors import ExportError
from torchq.onnx.ir import attribute, load_model, nodes_of, onnx_ir, save_model
from torchq.onnx.passes.pads import fold_pads
from torchq.onnx.passes.shapes import fold_shapes
from torchq.onnx.qdq import activation_qparams, read_record, write_record

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXPORTERS = [False, True]


class Shared(nn.Module):
    """A padded image that a convolution reads, and something else too."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.stem, self.conv, self.other = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 2), other

    def forward(self, x: Tensor) -> Any:
        x = F.pad(self.stem(x), (0, 1, 0, 1))
        y = self.conv(x)
        if self.other == "output":
            return x, y
        return y + F.max_pool2d(x, 2, 1)


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt", "qnn"])
@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_zeros_become_pads(target: str | None, dynamo: bool, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(2, 16, 12, 10)
    layers = (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.ZeroPad2d((0, 1, 2, 3)))
    model = nn.Sequential(*layers, nn.Conv2d(16, 32, 2, padding=1), torchq.nn.QuantIdentity())
    model = exported(model, x, path, target, dynamo=dynamo)
    assert pads(path) == [[1] * 4, [3, 1, 4, 2]]
    found = torchq.verify_onnx(model, path, [x, images(1, 16, 12, 10)])
    assert found.ok and len(found.layers) == 5
    onnx.checker.check_model(path, full_check=True)
    assert sqnr(run_file(path, x)[0], model(x)) > 35  # Behind a ReLU the file's grid is finer.


@pytest.mark.parametrize(
    ("layers", "shape", "expected"),
    [
        ([Pad(1, 2), nn.Conv1d(4, 4, 2)], (2, 4, 9), [1, 2]),
        ([Pad(1, 2, 3, 4, 5, 6), nn.Conv3d(4, 4, 2)], (2, 4, 3, 4, 5), [5, 3, 1, 6, 4, 2]),
        ([Pad(1, 0), Pad(0, 0, 2, 2), nn.Conv2d(4, 4, 2)], (2, 4, 6, 5), [2, 1, 2, 0]),
        ([Pad(0, 1, 0, 1), nn.Conv2d(4, 4, 2, 2, groups=4)], (2, 4, 7, 7), [0, 0, 1, 1]),
        ([Pad(0, 1, 0, 1), nn.Conv2d(4, 4, 2, padding="valid")], (2, 4, 7, 7), [0, 0, 1, 1]),
    ],
    ids=["one", "three", "twice", "depthwise", "valid"],
)
def test_dimensions(
    layers: list[nn.Module], shape: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    path, x = tmp_path / "model.onnx", images(*shape)
    model = exported(nn.Sequential(*layers), x, path, None)
    assert pads(path) == [expected]
    onnx.checker.check_model(path, full_check=True)
    assert torchq.verify_onnx(model, path, [x]).ok
    assert sqnr(run_file(path, x)[0], model(x)) > 100


def test_float_convolutions_pad_too(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Pad(1, 1, 0, 0), nn.Conv2d(4, 4, 3))
    with pytest.warns(UserWarning, match="no active quantizer"):
        torchq.export_onnx(model.eval(), x, path, dynamo=False)
    assert pads(path) == [[0] * 4, [0, 1, 0, 1]]
    assert sqnr(run_file(path, x)[0], model(x)) > 100


@pytest.mark.parametrize(
    "pad",
    [
        Pad(0, 1, 0, 1, value=1.0),
        Pad(0, 1, 0, 1, mode="reflect"),
        Pad(0, -1, 0, 1),
        Pad(0, 1, 0, 1, 0, 2),
    ],
    ids=["ones", "reflected", "cut", "channels"],
)
def test_other_pads_stay(pad: Pad, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    last = nn.Conv2d(8 if len(pad.amounts) < 6 else 10, 4, 2)
    model = exported(nn.Sequential(nn.Conv2d(3, 8, 3), pad, last), x, path, None)
    assert len(nodes_of(load_model(path), "Pad")) == 1
    assert torchq.verify_onnx(model, path, [x]).ok
    assert sqnr(run_file(path, x)[0], model(x)) > 100


def test_same_padding_stays(tmp_path: Path) -> None:
    """How much ``auto_pad`` adds depends on what the convolution reads."""
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    layers = (nn.Conv2d(3, 8, 3), Pad(0, 1, 0, 1), nn.Conv2d(8, 4, 3, padding="same"))
    model = exported(nn.Sequential(*layers), x, path, None)
    assert len(nodes_of(load_model(path), "Pad")) == 1
    assert sqnr(run_file(path, x)[0], model(x)) > 100


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_codes_behind_other_numbers(target: str, value: float, tmp_path: Path) -> None:
    """Zeros or more leave unsigned codes behind a ReLU; less needs codes for it."""
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), Pad(1, 1, 1, 1, value=value), nn.Conv2d(8, 4, 2))
    model = exported(nn.Sequential(*layers, torchq.nn.QuantIdentity()), x, path, target)
    found = torchq.verify_onnx(model, path, [x])
    assert found.ok and sqnr(run_file(path, x)[0], model(x)) > 35
    codes = activation_qparams(load_model(path))["3.input_quantizer"]
    assert codes.has_zero_point(codes.quant_min) is (value > 0)


@pytest.mark.parametrize("other", ["output", "pool"])
def test_other_readers_keep_the_pad(other: str, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    model = exported(Shared(other), x, path, None)
    assert len(nodes_of(load_model(path), "Pad")) == 1
    assert torchq.verify_onnx(model, path, [x]).ok
    expected = model(x) if other == "output" else [model(x)]
    for got, want in zip(run_file(path, x), expected, strict=True):
        assert sqnr(got, want) > 100


@pytest.mark.parametrize(("axis", "count"), [(1, 0), (3, 1)])
def test_scales_of_pixels_keep_the_pad(axis: int, count: int, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(1, 4, 6, 6)
    weight = torchq.QuantDescriptor(axis=0)
    rule = torchq.Rule("1", input=torchq.QuantDescriptor(axis=axis), weight=weight)
    config = torchq.QuantConfig((rule,))
    model = calibrated(nn.Sequential(Pad(0, 1, 0, 1), nn.Conv2d(4, 4, 2)), x, config=config)
    torchq.export_onnx(model, x, path, dynamo=False)
    assert len(nodes_of(load_model(path), "Pad")) == count
    assert torchq.verify_onnx(model, path, [x]).ok
    assert sqnr(run_file(path, x)[0], model(x)) > 100


def graph_of(*nodes: Any, stored: dict[str, Tensor], shape: Sequence[int]) -> Any:
    """A graph that reads ``x`` and returns ``y``."""
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, *sides, **attributes) for op, *sides, attributes in nodes],
        "test",
        [onnx.helper.make_tensor_value_info("x", kind, shape)],
        [onnx.helper.make_tensor_value_info("y", kind, None)],
        [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in stored.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])


def test_padded_weights_keep_the_pad() -> None:
    model = onnx_ir.from_proto(
        graph_of(
            ("Pad", ["x", "amounts"], ["padded"], {}),
            ("Conv", ["image", "padded"], ["y"], {}),
            stored={"amounts": torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]), "image": images(1, 4, 9, 9)},
            shape=(4, 4, 2, 2),
        )
    )
    fold_pads(model)
    assert len(nodes_of(model, "Pad")) == 1


@pytest.mark.parametrize("axes", [[2, 3], [-1, -2]])
def test_axes_of_pads(axes: list[int]) -> None:
    """Opset 18 has pads for chosen axes, which the exporters do not write."""
    weight = {"amounts": torch.tensor([1, 0, 2, 3]), "weight": images(4, 4, 2, 2)}
    model = onnx_ir.from_proto(
        graph_of(
            ("Pad", ["x", "amounts", "", "axes"], ["padded"], {}),
            ("Conv", ["padded", "weight"], ["y"], {}),
            stored={**weight, "axes": torch.tensor(axes)},
            shape=(1, 4, 6, 6),
        )
    )
    fold_pads(model)
    (node,) = nodes_of(model, "Conv")
    assert list(attribute(node, "pads")) == ([1, 0, 2, 3] if axes[0] == 2 else [0, 1, 3, 2])


@pytest.mark.parametrize(("count", "left"), [(4, 0), (4096, 1)])
def test_large_constants_are_not_stored(count: int, left: int) -> None:
    model = onnx_ir.from_proto(
        graph_of(
            ("ConstantOfShape", ["count"], ["zeros"], {}),
            ("Add", ["x", "zeros"], ["y"], {}),
            stored={"count": torch.tensor([count])},
            shape=(count,),
        )
    )
    fold_shapes(model)
    assert len(nodes_of(model, "ConstantOfShape")) == left


def damaged(path: Path, change: str) -> Path:
    """Write a file beside another one, with other pads or another record of them."""
    model, other = load_model(path), path.with_name("damaged.onnx")
    (name,) = read_record(model)["folded pads"]
    if change == "record":
        write_record(model, **{"folded pads": {name: [0, 0, 1, 0, 0, 0, 0, 1]}})
    elif change == "no record":
        write_record(model, **{"folded pads": {}})
    else:
        nodes_of(model, "Conv")[1].attributes["pads"] = onnx_ir.AttrInt64s("pads", [0, 0, 1, 1])
    save_model(model, other, check=False)
    return other


@pytest.mark.parametrize("change", ["record", "no record", "pads"])
def test_damage_is_found(change: str, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    layers = (nn.Conv2d(3, 4, 3), Pad(1, 0, 1, 0), nn.Conv2d(4, 4, 2), nn.ReLU())
    model = exported(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), x, path, None)
    assert torchq.verify_onnx(model, path, [x]).ok
    if change == "no record":
        with pytest.raises(ExportError, match=r"2\.input_quantizer: the model has shape"):
            torchq.verify_onnx(model, damaged(path, change), [x])
    else:
        assert not torchq.verify_onnx(model, damaged(path, change), [x]).ok


def test_equal_quantizers_become_one(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.up = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
            self.side = nn.Sequential(Pad(0, 1, 0, 1), nn.Conv2d(8, 8, 2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.side(x)[..., :4, :4] + self.up(x)

    path, x = tmp_path / "model.onnx", images(1, 3, 6, 6)
    model = exported(Branches(), x, path)
    assert pads(path) == [[0] * 4, [0, 0, 1, 1], [0] * 4]
    stem = nodes_of(load_model(path), "Conv")[0].outputs[0]
    assert [use.node.op_type for use in stem.uses()] == ["QuantizeLinear"]
    assert torchq.verify_onnx(model, path, [x]).ok
