"""``time_onnx``: files that are slower than float ones are found, and their slow layers named.

Nothing here depends on how fast the machine is: a margin of 0 calls every file slower, and the slow
layer of the last tests does a hundred times the work of its float twin.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from tests.onnx.exported import Residual, calibrated
from torchq.errors import ConfigError, ExportError
from torchq.onnx.ir import add_node, computed_by, load_model, nodes_of, readers, save_model
from torchq.onnx.timing.layers import FIRST, LayerNames
from torchq.onnx.timing.report import LayerTime, TimedNode, TimeReport, layer_times

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def nodes(*rows: tuple[str, str, float]) -> list[TimedNode]:
    """Return nodes from triples of operator, layer and microseconds."""
    return [
        TimedNode(f"node {i}", kind, layer, us * 1e-6) for i, (kind, layer, us) in enumerate(rows)
    ]


def test_the_layer_that_loses_the_most_comes_first() -> None:
    found = layer_times(
        nodes(("QLinearConv", "a", 10), ("QLinearConv", "b", 30), ("QLinearMul", "b", 40)),
        nodes(("Conv", "a", 20), ("Conv", "b", 50)),
    )
    assert [layer.name for layer in found] == ["b", "a"]
    assert found[0].loss == pytest.approx(20e-6)
    assert str(found[0]) == "0.07 ms, 0.05 in float (1.40 times): QLinearMul 0.04, QLinearConv 0.03"


def test_layers_that_float_fuses_are_joined_with_the_next_one() -> None:
    found = layer_times(
        nodes(("Q", FIRST, 1), ("QLinearConv", "a", 10), ("QLinearConv", "b", 10), ("Add", "c", 1)),
        nodes(("Conv", "b", 30), ("Conv", "c", 5), ("Gemm", "d", 2)),
    )
    assert [layer.name for layer in found] == ["d", "c", "a, b"]
    assert [len(layer.nodes) for layer in found] == [0, 1, 3]


def report(*layers: tuple[float, float], total: tuple[float, float]) -> TimeReport:
    """Return a report on layers with these microseconds in the file and in float."""
    found = tuple(
        LayerTime(str(i), tuple(nodes(("A", "", own))), tuple(nodes(("B", "", plain))))
        for i, (own, plain) in enumerate(layers)
    )
    return TimeReport("m.onnx", total[0], total[1], 1.05, 1, found)


def test_slower_are_layers_beyond_the_margin_that_matter() -> None:
    found = report((60, 50), (51.9, 50), (3, 1), (900, 1000), total=(1.0, 1.0))
    assert [layer.name for layer in found.slower] == ["0"]


@pytest.mark.parametrize(("seconds", "ok"), [(1.049, True), (1.051, False)])
def test_a_file_is_ok_within_the_margin(seconds: float, ok: bool) -> None:
    assert report(total=(seconds, 1.0)).ok is ok


def exported(model: nn.Module, path: Path, dynamo: bool) -> None:
    torchq.export_onnx(model, IMAGE, path, target="onnxruntime", dynamo=dynamo, progress=False)


@pytest.mark.parametrize("dynamo", [False, True])
def test_layers_have_the_names_of_the_model(tmp_path: Path, dynamo: bool) -> None:
    path = tmp_path / "m.onnx"
    model = calibrated(Tail() if dynamo else Residual(), IMAGE, target="onnxruntime", example=IMAGE)
    exported(model, path, dynamo)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="times as long as in float"):
        found = torchq.onnx.time_onnx(model, path, IMAGE, rounds=1, margin=0, progress=False)
    names = {part for layer in found.layers for part in layer.name.split(", ")}
    layers = {n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert names == layers
    assert all(layer.nodes and layer.float_nodes for layer in found.layers)
    kinds = {node.kind for layer in found.layers for node in layer.float_nodes}
    assert not [kind for kind in kinds if "Q" in kind]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Tail(nn.Module):
    """Two small convolutions with an image between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


def slowed(path: Path) -> None:
    """Put a hundred dequantized and quantized copies behind the codes of the first layer."""
    file = load_model(path)
    quantize = computed_by(readers_of_first(file).inputs[0], "QuantizeLinear")
    assert quantize is not None
    users, value = list(quantize.outputs[0].uses()), quantize.outputs[0]
    for number in range(100):
        parameters = list(quantize.inputs[1:])
        plain = add_node(value.producer(), "DequantizeLinear", [value, *parameters], f"{number}/a")
        # No kernel of ONNX Runtime reads codes here.
        plain = add_node(plain.producer(), "Erf", [plain], f"{number}/b")
        value = add_node(plain.producer(), "QuantizeLinear", [plain, *parameters], f"{number}/c")
    for user, index in users:
        user.replace_input_with(index, value)
    save_model(file, path, check=False)


def readers_of_first(file: object) -> object:
    """Return the DequantizeLinear in front of the second layer."""
    second = nodes_of(file, "Conv")[1]
    found = computed_by(second.inputs[0], "DequantizeLinear")
    assert found is not None
    assert readers(found.outputs[0]) == [second]
    return found


def test_a_slow_layer_is_named_with_its_nodes(tmp_path: Path) -> None:
    model, path = (
        calibrated(Tail(), IMAGE, target="onnxruntime", example=IMAGE),
        tmp_path / "m.onnx",
    )
    exported(model, path, False)
    slowed(path)
    with pytest.warns(UserWarning, match=r"- first: .* in float .*Erf"):
        found = torchq.onnx.time_onnx(model, path, IMAGE, rounds=2, progress=False)
    assert not found.ok
    assert found.slower[0].name == "first"
    assert sum(node.kind == "Erf" for node in found.slower[0].nodes) == 100
    assert "slower layers" in str(found)


def test_two_files_are_compared_and_the_fast_one_is_ok(tmp_path: Path) -> None:
    model = calibrated(Tail(), IMAGE, target="onnxruntime", example=IMAGE)
    slow, fast = tmp_path / "slow.onnx", tmp_path / "fast.onnx"
    for path in (slow, fast):
        exported(model, path, False)
    slowed(slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torchq.onnx.time_onnx(slow, fast, {"x": IMAGE}, rounds=2, progress=False)
    assert found.ok
    assert found.ratio > 1


def test_another_target_is_the_first_fix(tmp_path: Path) -> None:
    model, path = (
        calibrated(Tail(), IMAGE, target="onnxruntime", example=IMAGE),
        tmp_path / "m.onnx",
    )
    torchq.export_onnx(model, IMAGE, path, dynamo=False, progress=False)
    with pytest.warns(UserWarning, match="Pass target='onnxruntime'"):
        torchq.onnx.time_onnx(model, path, IMAGE, rounds=1, margin=0, progress=False)


def test_refusals(tmp_path: Path) -> None:
    model, path = (
        calibrated(Tail(), IMAGE, target="onnxruntime", example=IMAGE),
        tmp_path / "m.onnx",
    )
    exported(model, path, False)
    with pytest.raises(ConfigError, match="got rounds=0; expected at least 1"):
        torchq.onnx.time_onnx(model, path, IMAGE, rounds=0)
    with pytest.raises(ExportError, match=r"of shape \[3, 32, 32\] for the input"):
        torchq.onnx.time_onnx(path, path, IMAGE[0], progress=False)


def test_names_that_onnxruntime_adds_to_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    exported(calibrated(Tail(), IMAGE, target="onnxruntime", example=IMAGE), path, False)
    known = LayerNames(load_model(path))
    asked = ["Transpose", "/first/Conv_token_3", "Transpose_token_1", "/second/Conv_nchwc"]
    assert known.of(asked) == [FIRST, "first", "first", "second"]
