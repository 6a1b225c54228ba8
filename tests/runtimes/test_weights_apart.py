"""Layers that run several times, in sessions that store weights of their own for each product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.onnx.ir import is_constant, load_model, nodes_of, readers
from torchq.runtimes.onnxruntime.session import EXACT_PRODUCTS, Session
from torchq.runtimes.onnxruntime.weights_apart import with_weights_apart

pytest.importorskip("onnxruntime")


class Pyramid(nn.Module):
    """A head on two levels, as detectors have it, and layers with equal codes behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.down = nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Conv2d(8, 8, 3, padding=1)
        self.boxes = nn.Conv2d(8, 4, 1)
        self.scores = nn.Linear(4, 4)
        self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        large = self.stem(x).relu()
        small = self.down(large).relu()
        levels = [self.boxes(self.head(level).relu()) for level in (large, small)]
        tokens = [level.flatten(2).transpose(1, 2) for level in levels]
        pairs = zip(self.last, tokens, strict=True)
        return [layer(self.scores(rows)) for layer, rows in pairs]


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[nn.Module, Tensor, Path]:
    """Return a calibrated network, images, and its file."""
    model = Pyramid().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        # Equal codes of another scale.
        model.last[1].weight.copy_(2 * model.last[0].weight)
    x = torch.randn(4, 3, 12, 12, generator=generator)
    torchq.quantize_(model, target="onnxruntime", example=x[:1], progress=False)
    torchq.calibrate(model, [x], progress=False)
    path = tmp_path_factory.mktemp("apart") / "pyramid.onnx"
    torchq.export_onnx(model, x[:1], path, dynamo=False, progress=False)
    return model, x, path


def shared_codes(path: Path) -> list[str]:
    """Return stored codes that several nodes read, as codes or as values."""
    nodes = nodes_of(load_model(path, check=False), "DequantizeLinear")
    stored = [node for node in nodes if is_constant(node.inputs[0])]
    return [
        str(node.name)
        for node in stored
        if max(len(readers(node.inputs[0])), len(readers(node.outputs[0]))) > 1
    ]


def test_each_product_gets_codes_of_its_own(
    written: tuple[nn.Module, Tensor, Path], tmp_path: Path
) -> None:
    _, x, path = written
    graph = with_weights_apart(path)
    assert graph is not None
    assert len(shared_codes(path)) == 5
    apart = tmp_path / "apart.onnx"
    apart.write_bytes(graph)
    assert shared_codes(apart) == []
    assert with_weights_apart(apart) is None
    results = [Session(file, optimize=False).run({"x": x}) for file in (path, apart)]
    assert all(map(torch.equal, *results))


def test_a_session_without_overflow_computes_what_the_simulation_does(
    written: tuple[nn.Module, Tensor, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, x, path = written
    monkeypatch.setattr("torchq.runtimes.onnxruntime.session.saturates", lambda: True)
    session = Session(path, optimize=True)
    assert f"{EXACT_PRODUCTS}=1 and weights copied" in session.settings
    with torch.no_grad():
        assert all(map(torch.equal, session.run({"x": x}), model(x)))
    assert capfd.readouterr().err == ""
