"""The settings of OpenVINO: signed codes on CPUs that read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, run_file
from torchq.onnx.ir import load_model, nodes_of
from torchq.runtimes import EngineModule, OpenVino, openvino
from torchq.runtimes.openvino import with_signed_codes

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")


class Joined(nn.Module):
    """A convolution that reads a concatenation of two, whose codes have a zero point in files."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(torch.cat([self.left(x), self.right(x)], 1))


@pytest.fixture
def x() -> Tensor:
    """Return a small image."""
    return torch.randn(1, 8, 10, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(x: Tensor) -> nn.Module:
    """Return a calibrated network, with weights that overflow on no CPU."""
    torch.manual_seed(0)
    config = torchq.recipes.int8(reduce_range=True)
    return calibrated(Joined(), x, config=config, target="openvino", example=x)


def deployed(model: nn.Module, x: Tensor, settings: OpenVino | None = None) -> EngineModule:
    """Return the model on OpenVINO."""
    result = torchq.deploy(model, x, target=settings or OpenVino())
    assert isinstance(result, EngineModule)
    return result


def decided(module: EngineModule) -> bool | None:
    """Return what was decided for a deployed model."""
    assert isinstance(module.settings, OpenVino)
    return module.settings.signed_codes


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that sets whether the CPU is taken for one that reads signed codes."""
    return lambda value: monkeypatch.setattr(openvino, "reads_signed_codes", lambda: value)


def zero_points(graph: bytes, path: Path) -> set[tuple[str, int]]:
    """Return dtype and zero point of all activations in a file."""
    path.write_bytes(graph)
    points = (node.inputs[2].const_value for node in nodes_of(load_model(path), "QuantizeLinear"))
    return {(str(point.dtype), int(point.numpy())) for point in points}


def test_signed_codes_stand_for_the_same_values(
    model: nn.Module, x: Tensor, tmp_path: Path, reads: Callable[[bool], None]
) -> None:
    reads(False)
    graph = deployed(model, x).graph_bytes()
    signed = with_signed_codes(graph)
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    assert ("UINT8", 128) in zero_points(graph, before)
    assert zero_points(signed, after) == {("INT8", 0), ("UINT8", 0)}
    assert torch.equal(run_file(before, x)[0], run_file(after, x)[0])
    assert with_signed_codes(signed) is signed


def test_results_decide(
    model: nn.Module,
    x: Tensor,
    reads: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = openvino.reads_signed_codes()
    reads(False)
    unsigned = deployed(model, x)
    assert decided(unsigned) is None
    reads(True)
    found = deployed(model, x)
    # OpenVINO computes other numbers on CPUs that do not read these codes.
    assert decided(found) is (True if really else None)
    torch.testing.assert_close(found(x), unsigned(x), rtol=0, atol=1e-4)
    scaled = torchq.deploy(_scaled(model), x, target=OpenVino(signed_codes=False))
    assert isinstance(scaled, EngineModule)
    monkeypatch.setattr(openvino, "with_signed_codes", lambda graph: scaled.graph_bytes())
    assert decided(deployed(model, x)) is None


def _scaled(model: nn.Module) -> nn.Module:
    """Return a copy whose results are other ones."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        result.get_parameter("last.bias").add_(1)
    return result


def test_a_module_decides_anew_on_each_cpu(
    model: nn.Module, x: Tensor, reads: Callable[[bool], None]
) -> None:
    expected = deployed(model, x, OpenVino(signed_codes=False))
    reads(False)
    elsewhere = EngineModule(OpenVino(signed_codes=True), expected.graph, expected.interface)
    assert torch.equal(elsewhere(x), expected(x))
    assert elsewhere.summary_row() == expected.summary_row()


def test_settings_are_taken_as_given(
    model: nn.Module, x: Tensor, reads: Callable[[bool], None]
) -> None:
    reads(True)
    assert decided(deployed(model, x, OpenVino(signed_codes=False))) is False
    reads(False)
    assert decided(deployed(model, x, OpenVino(signed_codes=True))) is True


def test_files_without_such_codes_stay(x: Tensor, reads: Callable[[bool], None]) -> None:
    reads(True)
    plain = calibrated(nn.Sequential(nn.Conv2d(8, 8, 3)), x, target="openvino", example=x)
    assert decided(deployed(plain, x)) is None


def test_a_graph_for_other_lengths_is_opened_once_it_is_needed(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    compile_graph = OpenVino._compile

    def compiling(settings: OpenVino, graph: bytes, threads: int, shapes: Any) -> Any:
        opened.append(shapes)
        return compile_graph(settings, graph, threads, shapes)

    monkeypatch.setattr(OpenVino, "_compile", compiling)
    module = deployed(model, x, OpenVino(signed_codes=False))
    assert opened == [module.interface.usual[0], None]  # The second one was for comparing.
    module(x)
    assert len(opened) == 2
    for _ in range(2):
        assert module(torch.cat([x, x], 2)).shape == (1, 8, 18, 8)
    assert opened[2:] == [None]
