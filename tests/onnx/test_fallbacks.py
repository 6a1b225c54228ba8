"""Models that torch cannot trace as asked, and wrappers that must not reach a file."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.errors import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Remembers(nn.Module):
    """A head that keeps constants for the shape of its last call, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(6, 6), torch.Size()

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            self.shape = x.shape
            self.offsets = torch.zeros(x.shape)
        return self.linear(x) + self.offsets


def test_a_batch_size_that_cannot_be_open_is_fixed_with_a_warning(tmp_path: Path) -> None:
    model, path = calibrated(Remembers(), torch.randn(2, 6)), tmp_path / "m.onnx"
    with pytest.warns(UserWarning, match="fixed batch size of the example. Pass dynamic_batch"):
        torchq.export_onnx(model, torch.randn(2, 6), path, dynamo=True)
    (value,) = onnx.load(path).graph.input
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [2, 6]
    assert torchq.verify_onnx(model, path, [torch.randn(2, 6)]).ok


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_what_a_forward_stores_while_it_is_traced_is_not_kept(dynamo: bool, tmp_path: Path) -> None:
    if dynamo and torch.__version__ < (2, 10):
        pytest.skip("torch 2.9 exports no forward that stores a tensor")
    model, x = calibrated(Remembers(), torch.randn(3, 6)), torch.randn(2, 6)
    shape, offsets = model.shape, model.offsets
    torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=dynamo, dynamic_batch=False)
    assert model.shape is shape and model.offsets is offsets
    assert type(model(x)) is Tensor


class Untraceable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no tracing today")


def test_a_model_that_cannot_be_traced_at_all_is_an_error_without_a_warning(tmp_path: Path) -> None:
    with (
        pytest.raises(ExportError, match="no tracing today"),
        pytest.warns(UserWarning, match="no active quantizer") as seen,
    ):
        torchq.export_onnx(Untraceable(4, 4), torch.randn(2, 4), tmp_path / "m.onnx", dynamo=False)
    assert len(seen) == 1
    assert not (tmp_path / "m.onnx").exists()


def test_mixed_precision_of_accelerate_is_refused_by_name(tmp_path: Path) -> None:
    """Its wrapper casts inside forward, and stays after ``unwrap_model`` unless asked otherwise."""
    model = calibrated(nn.Sequential(nn.Linear(6, 6)), torch.randn(4, 6))
    original = model.forward
    model._original_forward = original
    inner = torch.autocast("cpu", dtype=torch.bfloat16)(original.__func__)
    model.forward = types.MethodType(inner, model)
    with pytest.raises(ExportError, match=r"unwrap_model\(model, keep_fp32_wrapper=False\)"):
        torchq.export_onnx(model, torch.randn(2, 6), tmp_path / "m.onnx", dynamo=False)
