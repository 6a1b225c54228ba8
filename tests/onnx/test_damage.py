"""Every kind of damage to a file makes ``verify_onnx`` say no, and name the layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.errors import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper = onnx.helper
numbers = onnx.numpy_helper


class Net(nn.Module):
    """A network with every operator that the damages below need, and two outputs of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.small = (
            nn.Conv2d(cin, 8, 3, padding=1) for cin in (3, 8, 8, 8)
        )
        self.join = nn.Conv2d(16, 8, 1)
        self.square = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        self.other = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.avg_pool2d(self.stem(x).relu(), 3, stride=2, padding=1)
        x = F.relu6(x - self.second(self.first(x).relu()))
        small = F.max_pool2d(self.small(x).relu(), 2)
        big = F.interpolate(small, scale_factor=1.5, mode="nearest")
        big = F.pad(big, (0, x.shape[3] - big.shape[3], 0, x.shape[2] - big.shape[2]))
        x = self.join(torch.cat([x, big], 1)).flatten(2).transpose(1, 2)
        x = self.norm(self.square(x)).softmax(2).mean(1)
        return self.head(x), self.other(x)


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[nn.Module, Path]]:
    """The network as exported without a target, and for ONNX Runtime."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("damage")
    x = torch.randn(8, 3, 16, 16)
    actual = {}
    for target in (None, "onnxruntime"):
        model = Net()
        with torch.no_grad():  # Outputs of different size for each image.
            for head in (model.head, model.other):
                head.weight.mul_(20)
        # Its products fit the kernels of all CPUs.
        config = torchq.recipes.int8(reduce_range=True)
        calibrated(model, x, config=config, target=target, example=x[:1])
        path = folder / f"{target}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torchq.export_onnx(
                model, x[:1], path, target=target, dynamo=False, output_names=["a", "b"]
            )
        actual[target or "plain"] = (model, path)
    return actual


class Editor:
    """A file under the knife: nodes and stored tensors by name."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(str(path))
        self.graph = self.model.graph

    def node(self, name: str) -> Any:
        """The node with this name, or this operator if only one has it, or the last of them."""
        named = [node for node in self.graph.node if node.name == name]
        return (named or [node for node in self.graph.node if node.op_type == name])[-1]

    def stored(self, name: str) -> numpy.ndarray:
        return next(
            numbers.to_array(t) for t in self.graph.initializer if t.name == name
        ).copy()

    def store(self, name: str, array: numpy.ndarray) -> None:
        tensor = next(t for t in self.graph.initializer if t.name == name)
        tensor.CopyFrom(numbers.from_array(array, name))

    def change(self, node: Any, index: int, change: Callable[[Any], Any]) -> None:
        """Give one input of a node a changed copy of the stored tensor, which others keep."""
        array = self.stored(node.input[index])
        new = numpy.asarray(change(array)).astype(array.dtype).reshape(array.shape)
        name = f"{node.name or node.output[0]}/changed{index}"
        self.graph.initializer.append(numbers.from_array(new, name))
        node.input[index] = name

    def pair(self, name: str) -> list[Any]:
        return [
            n
            for n in self.graph.node
            if n.name.rpartition("/")[0] == name and "Linear" in n.op_type
        ]

    def attribute(self, node: Any, name: str, value: Any) -> None:
        for index in reversed(range(len(node.attribute))):
            if node.attribute[index].name == name:
                del node.attribute[index]
        node.attribute.append(helper.make_attribute(name, value))

    def bypass(self, node: Any) -> None:
        """Remove a node; what read its result reads its first input."""
        for reader in self.graph.node:
            for index, name in enumerate(reader.input):
                if name == node.output[0]:
                    reader.input[index] = node.input[0]
        self.graph.node.remove(node)


def qdq(
    index: int, change: Callable[[Any], Any], only: str = ""
) -> Callable[[Editor], None]:
    """Damage a parameter of ``first.input_quantizer``: of both nodes, or of one."""

    def damage(file: Editor) -> None:
        for node in file.pair("first.input_quantizer"):
            if only in node.op_type:
                file.change(node, index, change)

    return damage


def weight(
    layer: str, index: int, change: Callable[[Any], Any]
) -> Callable[[Editor], None]:
    return lambda file: file.change(
        file.pair(f"{layer}.weight_quantizer")[0], index, change
    )


def bias(layer: str, change: Callable[[Any], Any]) -> Callable[[Editor], None]:
    def damage(file: Editor) -> None:
        name = next(
            t.name for t in file.graph.initializer if t.name.startswith(f"{layer}.bias")
        )
        file.store(name, change(file.stored(name)))

    return damage


def one(array: Any, value: Any) -> Any:
    """Add ``value`` to the first element."""
    array.reshape(-1)[0] += value
    return array


def channel(array: Any) -> Any:
    array.reshape(-1)[1] *= 1.01
    return array


def drop_bias(file: Editor) -> None:
    del file.node("/second/Conv").input[2:]


def drop_relu(file: Editor) -> None:
    file.bypass(
        next(
            n for n in file.graph.node if n.op_type == "Relu" and "first" in n.input[0]
        )
    )


def other_activation(file: Editor) -> None:
    node = next(
        n for n in file.graph.node if n.op_type == "Relu" and "first" in n.input[0]
    )
    node.op_type = "LeakyRelu"


def swap_inputs(op_type: str) -> Callable[[Editor], None]:
    def damage(file: Editor) -> None:
        node = file.node(op_type)
        node.input[0], node.input[1] = node.input[1], node.input[0]

    return damage


def attribute(op_type: str, name: str, value: Any) -> Callable[[Editor], None]:
    return lambda file: file.attribute(file.node(op_type), name, value)


def average_instead_of_maximum(file: Editor) -> None:
    node = file.node("MaxPool")
    node.op_type = "AveragePool"
    for index in reversed(range(len(node.attribute))):
        if node.attribute[index].name in ("dilations", "storage_order"):
            del node.attribute[index]


def drop_pair(file: Editor) -> None:
    for node in reversed(file.pair("first.input_quantizer")):
        file.bypass(node)


def round_down(file: Editor) -> None:
    """Codes as floor(x / scale): what a rounding before QuantizeLinear does."""
    node = file.pair("first.input_quantizer")[0]
    scale = node.input[1]
    place = list(file.graph.node).index(node)
    names = [f"down/{i}" for i in range(3)]
    new = [
        helper.make_node("Div", [node.input[0], scale], names[:1]),
        helper.make_node("Floor", names[:1], names[1:2]),
        helper.make_node("Mul", [names[1], scale], names[2:]),
    ]
    node.input[0] = names[2]
    for item in reversed(new):
        file.graph.node.insert(place, item)


def exchange_scales(file: Editor) -> None:
    pairs = [file.pair(f"{name}.input_quantizer") for name in ("first", "join")]
    scales = [pair[0].input[1] for pair in pairs]
    for pair, scale in zip(pairs, reversed(scales), strict=True):
        for node in pair:
            node.input[1] = scale


def exchange_weights(file: Editor) -> None:
    one, other = (
        file.pair(f"{name}.weight_quantizer")[0] for name in ("first", "second")
    )
    one.input[0], other.input[0] = other.input[0], one.input[0]


def another_branch(file: Editor) -> None:
    node = file.node("Sub")
    node.input[1] = node.input[0]


def exchange_outputs(file: Editor) -> None:
    for node in file.graph.node:
        for index, name in enumerate(node.output):
            node.output[index] = {"a": "b", "b": "a"}.get(name, name)


def other_clip(file: Editor) -> None:
    node = file.node("Clip")
    file.change(node, 2, lambda array: array * 0.1)


def transpose_weight(file: Editor) -> None:
    node = file.pair("square.weight_quantizer")[0]
    file.change(node, 0, lambda array: array.T)


def other_axis(file: Editor) -> None:
    node = file.pair("square.weight_quantizer")[0]
    axis = next(a.i for a in node.attribute if a.name == "axis")
    file.attribute(node, "axis", 1 - axis)


def float_parameter(file: Editor) -> None:
    file.store("norm.weight", one(file.stored("norm.weight"), 0.1))


# Damage -> file, edit, a part of what the report must name.
DAMAGES: dict[str, tuple[str, Callable[[Editor], None], str]] = {
    "all scales of an activation x100": (
        "plain",
        qdq(1, lambda s: s * 100),
        "first.input_",
    ),
    "a scale x0.1": ("plain", qdq(1, lambda s: s * 0.1), "first.input_"),
    "a scale of a target x1.01": (
        "onnxruntime",
        qdq(1, lambda s: s * 1.01),
        "first.input_",
    ),
    "a scale of zero": ("plain", qdq(1, lambda s: s * 0), "first.input_"),
    "a scale that is NaN": ("plain", qdq(1, lambda s: s * numpy.nan), "first.input_"),
    "a negative scale": ("plain", qdq(1, lambda s: -s), "first.input_"),
    "zero point 200": ("onnxruntime", qdq(2, lambda z: z * 0 + 200), "first.input_"),
    "a scale x1.001": ("onnxruntime", qdq(1, lambda s: s * 1.001), "first.input_"),
    "a zero point off by one": ("onnxruntime", qdq(2, lambda z: z + 1), "first.input_"),
    "the scale of DequantizeLinear": (
        "plain",
        qdq(1, lambda s: 2 * s, "Dequantize"),
        "first.inp",
    ),
    "the zero point of DequantizeLinear": (
        "plain",
        qdq(2, lambda z: z + 1, "Deq"),
        "first.input_",
    ),
    "scales of a weight x2": (
        "plain",
        weight("first", 1, lambda s: 2 * s),
        "first.weight",
    ),
    "one scale of a weight x1.01": (
        "plain",
        weight("first", 1, channel),
        "first.weight",
    ),
    "one scale of the last weight": (
        "plain",
        weight("other", 1, channel),
        "other.weight",
    ),
    "a zero point of a weight": (
        "plain",
        weight("first", 2, lambda z: one(z, 1)),
        "first.weight",
    ),
    "one code of a weight": (
        "plain",
        weight("second", 0, lambda codes: one(codes, -1 if codes.flat[0] > 0 else 1)),
        "second.weight",
    ),
    "the sign of a weight": (
        "plain",
        weight("stem", 0, lambda codes: -codes),
        "stem.weight",
    ),
    "channels of a weight": (
        "plain",
        weight("join", 0, lambda w: w[::-1]),
        "join.weight",
    ),
    "a transposed weight": ("plain", transpose_weight, "square.weight"),
    "scales on another axis": ("plain", other_axis, "square.weight"),
    "weights of two layers exchanged": ("plain", exchange_weights, "first.weight"),
    "one element of a bias": ("plain", bias("first", lambda b: one(b, 0.2)), "first"),
    "the last bias x10": ("plain", bias("head", lambda b: 10 * b), "output a"),
    "the other last bias x10": (
        "onnxruntime",
        bias("other", lambda b: 10 * b),
        "output b",
    ),
    "a bias left out": ("plain", drop_bias, "second"),
    "an activation left out": ("plain", drop_relu, "second.input_quantizer"),
    "another activation": ("plain", other_activation, "second.input_quantizer"),
    "inputs of a subtraction exchanged": (
        "plain",
        swap_inputs("Sub"),
        "small.input_quantizer",
    ),
    "inputs of a concatenation exchanged": (
        "plain",
        swap_inputs("Concat"),
        "join.input_quantizer",
    ),
    "another branch of a subtraction": (
        "plain",
        another_branch,
        "small.input_quantizer",
    ),
    "other padding": (
        "plain",
        attribute("/second/Conv", "pads", [0, 0, 2, 2]),
        "second",
    ),
    "another axis of a softmax": (
        "plain",
        attribute("Softmax", "axis", 1),
        "head.input_quantizer",
    ),
    "an average for a maximum": (
        "plain",
        average_instead_of_maximum,
        "join.input_quantizer",
    ),
    "padding that counts": (
        "plain",
        attribute("AveragePool", "count_include_pad", 0),
        "first.input_quantizer",
    ),
    "another epsilon": (
        "plain",
        attribute("LayerNormalization", "epsilon", 0.5),
        "head.input_quantizer",
    ),
    "another rounding of a resize": (
        "plain",
        attribute("Resize", "nearest_mode", "ceil"),
        "join.input_quantizer",
    ),
    "codes rounded down": ("plain", round_down, "first.input_quantizer"),
    "a quantizer left out": ("plain", drop_pair, "first.input_quantizer"),
    "scales of two quantizers exchanged": (
        "plain",
        exchange_scales,
        "first.input_quantizer",
    ),
    "other bounds of a clip": ("plain", other_clip, "small.input_quantizer"),
    "a parameter in float": ("plain", float_parameter, "head.input_quantizer"),
    "outputs exchanged": ("plain", exchange_outputs, "output a"),
}


@pytest.mark.parametrize("name", ["plain", "onnxruntime"])
def test_a_file_without_damage_agrees(
    name: str, files: dict[str, tuple[nn.Module, Path]], tmp_path: Path
) -> None:
    model, path = files[name]
    onnx.save(
        Editor(path).model,
        str(tmp_path / "m.onnx"),
    )
    report = torchq.verify_onnx(
        model,
        tmp_path / "m.onnx",
        [torch.randn(8, 3, 16, 16)],
    )
    assert report.ok, str(report)


@pytest.mark.sample(28)
@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damage_is_found_and_named(
    damage: str,
    files: dict[str, tuple[nn.Module, Path]],
    tmp_path: Path,
) -> None:
    name, edit, layer = DAMAGES[damage]
    model, path = files[name]
    file = Editor(path)
    edit(file)
    onnx.save(file.model, str(tmp_path / "m.onnx"))
    try:
        report = torchq.verify_onnx(
            model, tmp_path / "m.onnx", [torch.randn(8, 3, 16, 16)]
        )
    except ExportError as error:
        message = str(error)
    else:
        assert not report.ok, str(report)
        message = str(report)
    assert layer in message


class Through(nn.Module):
    """Returns what its input is; plans would see through a module that gives the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Bounds(nn.Module):
    """A network whose layers read values of each bound, through modules that a test can change."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.exact, self.sums, self.means = (
            nn.Conv2d(cin, 8, 3, padding=1) for cin in (3, 8, 8, 8)
        )
        self.shares = nn.Linear(8, 4)
        self.taps = nn.ModuleDict()
        for name in ("exact", "sums", "means", "shares"):
            self.taps[name] = Through()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.taps["sums"](x + self.exact(self.taps["exact"](x)).relu())
        x = self.taps["means"](F.avg_pool2d(self.sums(x).relu(), 2))
        return self.shares(self.taps["shares"](self.means(x).mean((2, 3)).softmax(1)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "few bits", "half"])
def test_every_bound_says_no_to_a_factor_of_less_than_a_code(
    target: str, path: Path
) -> None:
    """No parameter shows it: 1 % in half precision, 3 % for codes of 4 bits, or 3 per mille."""
    runtime = target if target == "onnxruntime" else "openvino"
    if runtime == "openvino" and target != "half":
        pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = Bounds()
    x = torch.rand(16, 3, 16, 16)
    few = target == "few bits"
    half = target == "half"
    config = (
        torchq.recipes.integer(4, 4) if few else torchq.recipes.int8(reduce_range=True)
    )
    planned = None if half else runtime
    calibrated(model, x, config=config, target=planned, example=x[:1])
    if half:
        model, x = model.half(), x.half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x[:1], path, dynamo=False)
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok, report.table()
    factor = 1.03 if few else 1.01 if half else 1.003
    for name, tap in model.taps.items():
        with tap.register_forward_hook(lambda _, inputs, out: out * factor):
            report = torchq.verify_onnx(model, path, [x])
        assert report.first is not None, name
        assert report.first.name == f"{name}.input_quantizer", report.table()
