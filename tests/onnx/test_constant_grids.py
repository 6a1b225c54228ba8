"""Scales and zero points are constants of the trace, with the values of the traced arithmetic."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ExportError

onnx = pytest.importorskip("onnx")

DESCRIPTORS = {
    "int8": torchq.QuantDescriptor(),
    "per channel": torchq.QuantDescriptor(axis=0),
    "asymmetric": torchq.QuantDescriptor(unsigned=True, symmetric=False),
    "4 bits, asymmetric": torchq.QuantDescriptor(4, axis=0, unsigned=True, symmetric=False),
    "scaled": torchq.QuantDescriptor(scale_amax=0.5),
    "learned": torchq.QuantDescriptor(learn_amax=True),
    "4 bits, clipped": torchq.QuantDescriptor(4),
    "blocks": torchq.QuantDescriptor(4, block_size=4),
    "e4m3": torchq.QuantDescriptor((4, 3)),
}


def model_with(*kinds: str) -> nn.Module:
    quantizers = [torchq.TensorQuantizer(DESCRIPTORS[kind]) for kind in kinds]
    model = nn.Sequential(*quantizers, nn.Linear(8, 8))
    torchq.calibrate(model, [torch.randn(8, 8)], progress=False)
    return model


def tensors(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    return {name: (array.shape, array.tobytes()) for name, array in found.items()}


def test_a_file_has_the_tensors_that_traced_arithmetic_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_with(*DESCRIPTORS), torch.randn(8, 8)
    before = [name for name, _ in model.named_buffers()]
    torchq.export_onnx(model, x, tmp_path / "a.onnx", dynamo=True, dynamic_batch=False)
    monkeypatch.setattr(
        import_module("torchq.onnx.export"), "constant_grids", lambda quantizers: nullcontext()
    )
    torchq.export_onnx(model, x, tmp_path / "b.onnx", dynamo=True, dynamic_batch=False)
    assert sorted(tensors(tmp_path / "a.onnx").values()) == sorted(
        tensors(tmp_path / "b.onnx").values()
    )
    assert [name for name, _ in model.named_buffers()] == before


def test_the_trace_follows_no_arithmetic_on_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = []

    def watched(*args: object, **kwargs: object) -> object:
        program = torch.export.export(args[0], args[1])  # type: ignore[arg-type]
        operators.extend(str(n.target) for n in program.graph.nodes if n.op == "call_function")
        raise RuntimeError("seen")

    monkeypatch.setattr(torch.onnx, "export", watched)
    model = model_with("int8")
    with pytest.raises(ExportError, match="seen"):
        torchq.export_onnx(
            model, torch.randn(8, 8), tmp_path / "m.onnx", dynamo=True, dynamic_batch=False
        )
    assert operators and not any("div" in name or "where" in name for name in operators)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no tracing today")


def test_a_failed_export_leaves_quantizers_as_they_were(tmp_path: Path) -> None:
    model = model_with("int8")
    model.append(Fails())
    quantizer = model[0]
    with pytest.raises(ExportError, match="no tracing today"):
        torchq.export_onnx(
            model, torch.randn(8, 8), tmp_path / "m.onnx", dynamo=True, dynamic_batch=False
        )
    assert quantizer.delegate is None
    assert [name for name, _ in quantizer.named_buffers()] == ["amax"]
