"""Additions that OpenVINO's convolutions compute because a pair of 16 bits lets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import calibrated, run_file
from torchq.engines import as_written
from torchq.onnx.ir import load_model, nodes_of, opset_of, replace_stored, save_model, value_of
from torchq.onnx.passes.kernels.limited_sums import limit_sums, remove_limits

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

#: The side of an image whose result of 256 channels just counts as large.
SIDE = 28


class Block(nn.Module):
    """Two convolutions, and what the second one is added to."""

    def __init__(
        self, channels: int = 256, kernel: int = 1, groups: int = 1, down: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 1)
        self.second = nn.Conv2d(16, channels, kernel, padding=kernel // 2, groups=groups)
        self.down = nn.Conv2d(channels, channels, 1) if down else nn.Identity()
        nn.init.normal_(self.second.weight)  # What is added is as large as what it is added to.

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).relu()) + self.down(x)).relu()


class Stem(nn.Module):
    """A convolution with a ReLU."""

    def __init__(self, channels: int = 256) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


def network(*, head: bool = True, **options: Any) -> nn.Module:
    """Return two blocks between convolutions, or without the last one."""
    torch.manual_seed(0)
    channels = options.get("channels", 256)
    last = nn.Conv2d(channels, 4, 1) if head else nn.Identity()
    return nn.Sequential(Stem(channels), Block(**options), Block(**options), last).eval()


@pytest.fixture
def x() -> Tensor:
    """Return an image."""
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def exported(model: nn.Module, x: Tensor, path: Path, **options: Any) -> nn.Module:
    """Quantize a model, with weights that overflow on no CPU, and export it for OpenVINO."""
    config = torchq.recipes.int8(reduce_range=True)
    model = calibrated(model, x, config=config, target="openvino", example=x)
    options = {"dynamo": False, "dynamic_batch": False, **options}
    torchq.export_onnx(model, x, path, target="openvino", **options)
    return model


def limits(path: Path) -> list[str]:
    """Return the names of the limits in a file."""
    nodes = nodes_of(load_model(path), "DequantizeLinear")
    return [node.name for node in nodes if node.name.endswith("/limited")]


def without_limits(path: Path) -> Path:
    """Write a file without its limits beside it."""
    model, other = load_model(path), path.with_name("plain.onnx")
    assert not remove_limits(model)
    save_model(model, other)
    return other


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("fixed", [True, False])
def test_convolutions_add_branches(dynamo: bool, fixed: bool, x: Tensor, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    path = tmp_path / "model.onnx"
    model = exported(network(), x, path, dynamo=dynamo, dynamic_batch=not fixed)
    assert len(limits(path)) == 2 and opset_of(load_model(path)) == 21
    core = openvino.Core()
    graph = core.read_model(str(path))
    graph.reshape(list(x.shape))  # OpenVINO makes kernels of additions for fixed shapes alone.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(graph, "CPU", settings)
    nodes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    kinds = [str(node["layerType"].value) for node in nodes]
    assert kinds.count("Convolution") == 6
    assert kinds.count("Subgraph") + kinds.count("FakeQuantize") == 1  # That of the image.
    found = torch.from_numpy(compiled([x.numpy()])[0].copy())
    # OpenVINO does not round where it adds: a code falls the other way at a tie alone, while codes
    # of 16 bits would change one of 256.
    assert sqnr(found, run_file(without_limits(path), x)[0]) > 60
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok and sum(layer.mismatches for layer in report.layers) == 0


def test_a_deployed_model_is_compared_without_them(
    x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    model = calibrated(network(), x, target="openvino", example=x)
    module = torchq.deploy(model, x, engine="openvino")
    path = tmp_path / "model.onnx"
    path.write_bytes(module.graph_bytes())
    assert len(limits(path)) == 2
    seen: list[Tensor] = []
    monkeypatch.setattr(as_written, "too_different", lambda _, of_file, *__: seen.extend(of_file))
    as_written.runs_as_written(module, model, x)
    assert torch.equal(seen[0], run_file(without_limits(path), x)[0])
    assert not torch.equal(seen[0], run_file(path, x)[0])


@pytest.mark.parametrize(
    ("options", "side"),
    [
        ({}, SIDE - 2),
        ({"channels": 248}, SIDE + 2),
        ({"kernel": 3}, SIDE),
        ({"groups": 16}, SIDE),
        ({"down": True}, SIDE),
    ],
    ids=["small", "channels", "kernel", "groups", "two convolutions"],
)
def test_other_sums_stay(options: dict[str, Any], side: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(network(**options), torch.randn(1, 3, side, side), path)
    assert limits(path) == [] and opset_of(load_model(path)) == 20


def test_results_that_are_not_quantized_stay(x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(network(head=False), x, path)
    assert len(limits(path)) == 1


def test_the_other_operand_may_be_pooled(x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = nn.Sequential(network()[0], nn.MaxPool2d(3, 1, 1), *network()[1:])
    exported(model.eval(), x, path)
    assert len(limits(path)) == 2


def test_large_kernels_need_larger_results(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(network(kernel=3), torch.randn(1, 3, 3 * SIDE, 3 * SIDE), path)
    assert len(limits(path)) == 2


@pytest.mark.parametrize("images", [1, 2])
def test_the_example_decides_for_open_lengths(images: int, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", torch.randn(images, 3, 20, 20)
    shapes = {"image": {2: "height", 3: "width"}}
    model = nn.Sequential(network())
    model.forward = lambda image: model[0](image)  # type: ignore[method-assign]
    names = {"input_names": ["picture"], "dynamic_batch": True, "dynamic_shapes": shapes}
    exported(model, x, path, **names)
    assert len(limits(path)) == (2 if images == 2 else 0)


@pytest.mark.parametrize(("opset", "count"), [(20, 0), (21, 2), (None, 2)])
def test_an_opset_that_was_asked_for_stays(
    opset: int | None, count: int, x: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    exported(network(), x, path, opset=opset)
    assert opset_of(load_model(path)) == (opset or 21) and len(limits(path)) == count


@pytest.mark.parametrize("factor", [1, 100])
def test_nothing_is_cut_that_counts(factor: float, x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(network(), x, path)  # Images 100 times as large exceed all ranges.
    plain = run_file(without_limits(path), factor * x)[0]
    # ONNX Runtime rounds to 16 bits: one code of 8 bits in 256 falls the other way.
    assert sqnr(run_file(path, factor * x)[0], plain) > 40
    assert sqnr(run_file(damaged(path, 0.3), factor * x)[0], plain) < 30


def damaged(path: Path, factor: float, part: str = "/limited") -> Path:
    """Write a file with other limits beside it; ``part`` of a name chooses the stored tensors."""
    model, other = load_model(path), path.with_name("damaged.onnx")
    for name, value in list(model.graph.initializers.items()):
        if part in name and name.endswith("/scale"):
            replace_stored(value, value_of(value) * factor)
    save_model(model, other)
    return other


@pytest.mark.parametrize(
    ("part", "factor"),
    [("/limited", 0.99), ("/limited codes", 0.99), ("/limited codes", 1.01), ("/limited/", 1.01)],
)
def test_limits_that_change_sums_are_reported(
    part: str, factor: float, x: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    model = exported(network(), x, path)
    assert torchq.verify_onnx(model, path, [x]).ok
    report = torchq.verify_onnx(model, damaged(path, factor, part), [x])
    assert not report.ok
    text = "changes what is added"
    assert [layer.name for layer in report.layers if layer.parameters == text] == limits(path)


def test_files_with_limits_are_read(x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(network(), x, path)
    assert sqnr(torchq.from_onnx(path)(x), run_file(path, x)[0]) > 60


def test_scales_of_16_bits_stay(x: Tensor, tmp_path: Path) -> None:
    path, other = tmp_path / "model.onnx", tmp_path / "half.onnx"
    exported(network(), x, path)
    model = load_model(without_limits(path))
    for name, value in list(model.graph.initializers.items()):
        if "second.weight_quantizer/scale" in name:
            replace_stored(value, value_of(value).half())
    limit_sums(model)
    save_model(model, other, check=False)
    assert limits(other) == []


def test_other_runtimes_get_none(x: Tensor, tmp_path: Path) -> None:
    path, other = tmp_path / "model.onnx", tmp_path / "other.onnx"
    exported(network(), x, path)
    with pytest.warns(UserWarning, match="its output is not quantized"):
        torchq.onnx.retarget_onnx(path, other, "onnxruntime")
    assert len(limits(path)) == 2 and limits(other) == []
