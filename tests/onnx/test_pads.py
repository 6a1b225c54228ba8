"""Zeros that convolutions of a file add themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import activation_qparams, calibrated, graph_of, run_file
from tests.onnx.exported import exported as write
from torchq.errors import ExportError
from torchq.onnx.ir import attribute, load_model, nodes_of, onnx_ir, save_model
from torchq.onnx.passes.convolutions import fold_pads, with_lengths
from torchq.onnx.qdq import read_record, write_record

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Pad(nn.Module):
    """``torch.nn.functional.pad``."""

    def __init__(self, *amounts: int, mode: str = "constant", value: float = 0) -> None:
        super().__init__()
        self.amounts = amounts
        self.mode = mode
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.amounts, self.mode, self.value or None)


class Same(nn.Module):
    """A convolution with strides and "same" padding, as TensorFlow and timm have it."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        left = self._added(x.shape[-1])
        up = self._added(x.shape[-2])
        sides = [left // 2, left - left // 2, up // 2, up - up // 2]
        return self.conv(F.pad(x, sides))

    def _added(self, length: Any) -> Any:
        kernel = self.conv.kernel_size[0]
        if isinstance(length, Tensor):  # While TorchScript traces.
            count = (torch.ceil(length / 2) - 1) * 2 + kernel - length
            return torch.clamp(count, min=0).to(torch.int64)
        return max((math.ceil(length / 2) - 1) * 2 + kernel - length, 0)


class Mobile(nn.Module):
    """Two "same" convolutions; a ReLU and a quantizer stand between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Same(3, 8)
        self.down = Same(8, 16, 4)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.stem(x).relu()).relu().mean((2, 3)))


#: Weights that overflow on no CPU.
NARROW = torchq.recipes.int8(reduce_range=True)


def exported(
    model: nn.Module, x: Tensor, path: Path, *target: Any, **options: Any
) -> Any:
    torch.manual_seed(0)
    return write(model, x, path, *target, config=NARROW, **options)


def pads(path: Path) -> list[list[int]]:
    """The pads of the convolutions in a file without Pad nodes."""
    model = load_model(path)
    assert not nodes_of(model, "Pad")
    return [list(attribute(node, "pads", ())) for node in nodes_of(model, "Conv")]


def images(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape)


EXPORTERS = [False, True]


class Shared(nn.Module):
    """A padded image that a convolution reads, and something else too."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.conv = nn.Conv2d(8, 8, 2)
        self.other = other

    def forward(self, x: Tensor) -> Any:
        x = F.pad(
            self.stem(x),
            (0, 1, 0, 1),
        )
        y = self.conv(x)
        if self.other == "output":
            return x, y
        return y + F.max_pool2d(x, 2, 1)


SINGLE = torchq.runtimes.TensorRt(precision="float32")


@pytest.mark.sample(3)
@pytest.mark.eight_bit_products("openvino")
@pytest.mark.parametrize(
    "target", [None, "onnxruntime", "openvino", SINGLE, "qnn"], ids=str
)
@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_zeros_become_pads(target: Any, dynamo: bool, path: Path) -> None:
    x = images(2, 16, 12, 10)
    layers = (
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.ZeroPad2d((0, 1, 2, 3)),
    )
    model = nn.Sequential(
        *layers, nn.Conv2d(16, 32, 2, padding=1), torchq.nn.QuantIdentity()
    )
    model = exported(model, x, path, target, dynamo=dynamo)
    assert pads(path) == [[1] * 4, [3, 1, 4, 2]]
    actual = torchq.verify_onnx(model, path, [x, images(1, 16, 12, 10)])
    assert actual.ok, str(actual)
    onnx.checker.check_model(path, full_check=True)
    # Behind a ReLU the file's grid is finer.
    assert sqnr(run_file(path, x)[0], model(x)) > 35


@pytest.mark.parametrize(
    ("layers", "shape", "expected"),
    [
        ([Pad(1, 2), nn.Conv1d(4, 4, 2)], (2, 4, 9), [1, 2]),
        (
            [Pad(1, 2, 3, 4, 5, 6), nn.Conv3d(4, 4, 2)],
            (2, 4, 3, 4, 5),
            [5, 3, 1, 6, 4, 2],
        ),
        (
            [
                Pad(1, 0),
                Pad(0, 0, 2, 2),
                nn.Conv2d(4, 4, 2),
            ],
            (2, 4, 6, 5),
            [2, 1, 2, 0],
        ),
        (
            [Pad(0, 1, 0, 1), nn.Conv2d(4, 4, 2, 2, groups=4)],
            (2, 4, 7, 7),
            [0, 0, 1, 1],
        ),
        (
            [Pad(0, 1, 0, 1), nn.Conv2d(4, 4, 2, padding="valid")],
            (2, 4, 7, 7),
            [0, 0, 1, 1],
        ),
    ],
    ids=["one", "three", "twice", "depthwise", "valid"],
)
def test_dimensions(
    layers: list[nn.Module], shape: tuple[int, ...], expected: list[int], path: Path
) -> None:
    x = images(*shape)
    model = exported(nn.Sequential(*layers), x, path, None)
    assert pads(path) == [expected]
    onnx.checker.check_model(path, full_check=True)
    assert torchq.verify_onnx(model, path, [x]).ok
    assert sqnr(run_file(path, x)[0], model(x)) > 100


NARROW_CONV = nn.Conv2d(8, 4, 2)


@pytest.mark.parametrize(
    ("pad", "last"),
    [
        (Pad(0, 1, 0, 1, value=1.0), NARROW_CONV),
        (Pad(0, 1, 0, 1, mode="reflect"), NARROW_CONV),
        (Pad(0, -1, 0, 1), NARROW_CONV),
        (Pad(0, 1, 0, 1, 0, 2), nn.Conv2d(10, 4, 2)),
        (Pad(0, 1, 0, 1), nn.Conv2d(8, 4, 3, padding="same")),
    ],
    ids=["ones", "reflected", "cut", "channels", "auto_pad"],
)
def test_other_pads_stay(pad: Pad, last: nn.Module, path: Path) -> None:
    """How much ``auto_pad`` adds depends on what the convolution reads."""
    x = images(1, 3, 6, 6)
    layers = (nn.Conv2d(3, 8, 3), pad, copy.deepcopy(last))
    model = exported(nn.Sequential(*layers), x, path, None)
    assert len(nodes_of(load_model(path), "Pad")) == 1
    assert torchq.verify_onnx(model, path, [x]).ok
    assert sqnr(run_file(path, x)[0], model(x)) > 100


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_codes_behind_other_numbers(target: str, value: float, path: Path) -> None:
    """Zeros or more leave unsigned codes behind a ReLU; less needs codes for it."""
    x = images(1, 3, 6, 6)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        Pad(1, 1, 1, 1, value=value),
        nn.Conv2d(8, 4, 2),
    )
    model = exported(nn.Sequential(*layers, torchq.nn.QuantIdentity()), x, path, target)
    actual = torchq.verify_onnx(model, path, [x])
    assert actual.ok
    assert sqnr(run_file(path, x)[0], model(x)) > 35
    codes = activation_qparams(load_model(path))["3.input_quantizer"]
    assert codes.has_zero_point(codes.quant_min) is (value > 0)


@pytest.mark.parametrize("other", ["output", "pool"])
def test_other_readers_keep_the_pad(other: str, path: Path) -> None:
    x = images(1, 3, 6, 6)
    model = exported(Shared(other), x, path, None)
    assert len(nodes_of(load_model(path), "Pad")) == 1
    assert torchq.verify_onnx(model, path, [x]).ok
    expected = model(x) if other == "output" else [model(x)]
    for got, want in zip(run_file(path, x), expected, strict=True):
        assert sqnr(got, want) > 100


@pytest.mark.parametrize(
    ("axis", "count"),
    [(1, 0), (3, 1)],
)
def test_scales_of_pixels_keep_the_pad(axis: int, count: int, path: Path) -> None:
    x = images(1, 4, 6, 6)
    weight = torchq.QuantDescriptor(axis=0)
    rule = torchq.Rule("1", input=torchq.QuantDescriptor(axis=axis), weight=weight)
    config = torchq.QuantConfig((rule,))
    model = calibrated(
        nn.Sequential(Pad(0, 1, 0, 1), nn.Conv2d(4, 4, 2)), x, config=config
    )
    torchq.export_onnx(model, x, path, dynamo=False)
    assert len(nodes_of(load_model(path), "Pad")) == count
    assert torchq.verify_onnx(model, path, [x]).ok
    assert sqnr(run_file(path, x)[0], model(x)) > 100


def test_padded_weights_keep_the_pad() -> None:
    model = graph_of(
        ("Pad", ["x", "amounts"], ["padded"], {}),
        ("Conv", ["image", "padded"], ["y"], {}),
        stored={
            "amounts": torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]),
            "image": images(1, 4, 9, 9),
        },
        shape=(4, 4, 2, 2),
    )
    fold_pads(model)
    assert len(nodes_of(model, "Pad")) == 1


@pytest.mark.parametrize("axes", [[2, 3], [-1, -2]])
def test_axes_of_pads(axes: list[int]) -> None:
    """Opset 18 has pads for chosen axes, which the exporters do not write."""
    weight = {"amounts": torch.tensor([1, 0, 2, 3]), "weight": images(4, 4, 2, 2)}
    model = graph_of(
        ("Pad", ["x", "amounts", "", "axes"], ["padded"], {}),
        ("Conv", ["padded", "weight"], ["y"], {}),
        stored={**weight, "axes": torch.tensor(axes)},
        shape=(1, 4, 6, 6),
    )
    fold_pads(model)
    (node,) = nodes_of(model, "Conv")
    assert list(attribute(node, "pads")) == (
        [1, 0, 2, 3] if axes[0] == 2 else [0, 1, 3, 2]
    )


def damaged(path: Path, change: str) -> Path:
    """Write a file beside another one, with other pads or another record of them."""
    model = load_model(path)
    other = path.with_name("damaged.onnx")
    (name,) = read_record(model)["folded pads"]
    if change == "record":
        write_record(model, **{"folded pads": {name: [0, 0, 1, 0, 0, 0, 0, 1]}})
    elif change == "no record":
        write_record(model, **{"folded pads": {}})
    else:
        nodes_of(model, "Conv")[1].attributes["pads"] = onnx_ir.AttrInt64s(
            "pads", [0, 0, 1, 1]
        )
    save_model(model, other, check=False)
    return other


@pytest.mark.parametrize("change", ["record", "no record", "pads"])
def test_damage_is_found(change: str, path: Path) -> None:
    x = images(1, 3, 6, 6)
    layers = (
        nn.Conv2d(3, 4, 3),
        Pad(1, 0, 1, 0),
        nn.Conv2d(4, 4, 2),
        nn.ReLU(),
    )
    model = exported(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), x, path, None)
    assert torchq.verify_onnx(model, path, [x]).ok
    if change == "no record":
        with pytest.raises(
            ExportError, match=r"2\.input_quantizer: the model has shape"
        ):
            torchq.verify_onnx(model, damaged(path, change), [x])
    else:
        assert not torchq.verify_onnx(model, damaged(path, change), [x]).ok


def test_equal_quantizers_become_one(path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.up = nn.Conv2d(8, 8, 1)
            self.side = nn.Sequential(
                Pad(0, 1, 0, 1),
                nn.Conv2d(8, 8, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.side(x)[..., :4, :4] + self.up(x)

    x = images(1, 3, 6, 6)
    model = exported(Branches(), x, path)
    assert pads(path) == [[0] * 4, [0, 0, 1, 1], [0] * 4]
    stem = nodes_of(load_model(path), "Conv")[0].outputs[0]
    assert [use.node.op_type for use in stem.uses()] == ["QuantizeLinear"]
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_known_lengths_are_computed(dynamo: bool, path: Path) -> None:
    x = images(2, 3, 13, 16)
    model = exported(Mobile(), x, path, dynamo=dynamo)
    assert pads(path) == [[1, 0, 1, 1], [1, 1, 2, 1]]
    assert not nodes_of(
        load_model(path), "Shape", "Ceil", "Concat", "ConstantOfShape", "Cast"
    )
    assert torchq.verify_onnx(model, path, [x, images(3, 3, 13, 16)]).ok


def open_file(path: Path, x: Tensor, target: str) -> nn.Module:
    shapes = {"x": {2: "height", 3: "width"}}
    return exported(Mobile(), x, path, target, dynamic_shapes=shapes)


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_open_lengths_become_known(target: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    fixed = tmp_path / "fixed.onnx"
    x = images(2, 3, 13, 16)
    model = open_file(path, x, target)
    assert len(nodes_of(load_model(path), "Pad")) == 2
    graph = path.read_bytes()
    fixed.write_bytes(with_lengths(graph, [("x", (1, 3, 13, 16))]))
    assert pads(fixed) == [[1, 0, 1, 1], [1, 1, 2, 1]]
    assert not nodes_of(load_model(fixed), "Shape")
    for count in (1, 2, 3):  # The batch stays open.
        y = images(count, 3, 13, 16)
        assert sqnr(run_file(fixed, y)[0], run_file(path, y)[0]) > 100
    assert torchq.verify_onnx(model, fixed, [x]).ok
    assert path.read_bytes() == graph


def test_files_without_computed_pads_stay(path: Path) -> None:
    x = images(1, 3, 6, 6)
    exported(nn.Sequential(nn.Conv2d(3, 4, 3), Pad(1, 0, value=2.0)), x, path, None)
    graph = path.read_bytes()
    assert b"Pad" in graph
    assert with_lengths(graph, [("x", (1, 3, 6, 6))]) is graph
    open_file(path, images(1, 3, 16, 16), "onnxruntime")
    graph = path.read_bytes()
    assert with_lengths(graph, [("other", (1, 3, 16, 16))]) is graph


@pytest.mark.slow
@pytest.mark.xfail(
    reason="files of the default exporter keep the pads of usual shapes", strict=True
)
@pytest.mark.parametrize("engine", ["onnxruntime"])
def test_engines_open_usual_shapes_apart(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(engine)
    opened = graphs_opened(engine, monkeypatch)
    x = images(1, 3, 16, 16)
    config = torchq.recipes.int8(reduce_range=True)
    model = calibrated(Mobile().eval(), x, config=config, target=engine, example=x)
    deployed = torchq.deploy(model, x, target=engine)
    opened.clear()
    deployed._reset()
    actual = []
    for shape in (
        (1, 3, 16, 16),
        (2, 3, 16, 16),
        (1, 3, 15, 18),
        (1, 3, 16, 16),
        (2, 3, 17, 17),
    ):
        y = images(*shape)
        assert sqnr(deployed(y), model(y)) > 25
        actual.append(list(opened))
    # OpenVINO opens a graph for this number of images alone.
    second = [0] if engine == "onnxruntime" else [0, 2]
    assert actual == [[0], second, [0, 2], [0, 2], [0, 2]]


def graphs_opened(engine: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of Pad nodes of each graph that an engine opens."""
    import onnxruntime

    opened: list[int] = []

    def note(graph: bytes) -> None:
        nodes: Sequence[Any] = onnx.load_model_from_string(graph).graph.node
        opened.append(sum(node.op_type == "Pad" for node in nodes))

    if engine == "onnxruntime":
        session = onnxruntime.InferenceSession

        def start(path: str, *args: Any, **options: Any) -> Any:
            note(Path(path).read_bytes())
            return session(path, *args, **options)

        monkeypatch.setattr(onnxruntime, "InferenceSession", start)
        return opened
    import openvino

    read: list[bytes] = []

    class Core(openvino.Core):
        # Graphs are also read, without being compiled, to see whether they take an image size.
        def read_model(self, file: Any, *args: Any) -> Any:
            read.append(file.getvalue())
            return super().read_model(file, *args)

        def compile_model(self, *args: Any) -> Any:
            note(read[-1])
            return super().compile_model(*args)

    monkeypatch.setattr(openvino, "Core", Core)
    return opened
