"""Arguments and results of other forms than one tensor, in exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Base(nn.Module):
    """One quantized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)


class OfMapping(Base):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.linear(features["x"]) + features["y"]


class OfPair(Base):
    def forward(self, pair: tuple[Tensor, Tensor], rest: Tensor) -> Tensor:
        return self.linear(pair[0]) + 2 * pair[1] + 3 * rest


class WithInput(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class Silent(Base):
    def forward(self, x: Tensor) -> None:
        self.linear(x)


def ready(model: nn.Module, example: Any) -> nn.Module:
    torchq.quantize_(model.eval())
    torchq.calibrate(model, [example], progress=False)
    return model


def of_mapping() -> tuple[Any, ...]:
    return ({"x": torch.randn(4, 6), "y": torch.randn(4, 6)},)


def of_pair() -> tuple[Any, ...]:
    return (torch.randn(4, 6), torch.randn(4, 6)), torch.randn(4, 6)


CONTAINERS = pytest.mark.parametrize(
    ("kind", "example", "names"),
    [(OfMapping, of_mapping, ["features_0", "features_1"]),
     (OfPair, of_pair, ["pair_0", "pair_1", "rest"])],
)  # fmt: skip


@CONTAINERS
def test_tensors_in_containers_are_inputs(
    kind: Any, example: Any, names: list[str], tmp_path: Path
) -> None:
    model, path = ready(kind(), example()), tmp_path / "m.onnx"
    torchq.export_onnx(model, example(), path, dynamic_batch=False)
    assert [value.name for value in onnx.load(path).graph.input] == names
    assert torchq.verify_onnx(model, path, [example()]).ok


@CONTAINERS
def test_tensors_in_containers_are_not_stored_as_constants(
    kind: Any, example: Any, names: list[str], tmp_path: Path
) -> None:
    model = ready(kind(), example())
    message = rf"got the tensors {', '.join(names[:2])} inside a container.*dynamo=True"
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(model, example(), tmp_path / "m.onnx", dynamo=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_input_that_is_an_output_keeps_its_name(tmp_path: Path, dynamo: bool) -> None:
    x = torch.randn(4, 6)
    model, path = ready(WithInput(), x), tmp_path / "m.onnx"
    torchq.export_onnx(model, x, path, dynamo=dynamo)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["x"]
    assert len({value.name for value in (*graph.input, *graph.output)}) == 3
    assert torchq.verify_onnx(model, path, [torch.randn(3, 6)]).ok


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_model_without_results_is_refused(tmp_path: Path, dynamo: bool) -> None:
    model = ready(Silent(), torch.randn(4, 6))
    with pytest.raises(ExportError, match="Silent returns no tensor; expected one at least"):
        torchq.export_onnx(model, torch.randn(4, 6), tmp_path / "m.onnx", dynamo=dynamo)
