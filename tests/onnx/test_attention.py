"""Attention in files: integer weights for each projection, equal numbers, both exporters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from tests.onnx.exported import calibrated, ends

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXPORTERS = [
    False,
    True,
]


@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_attention_exports(target: str | None, dynamo: bool, tmp_path: Path) -> None:
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(3, 6, 16)
    calibrated(model, x, target=target)
    path = tmp_path / "m.onnx"
    report = torchq.export_onnx(
        model, x[:1], path, target=target, dynamo=dynamo, dynamic_shapes={"src": {1: "length"}}
    )
    parts = ("weight", "key_weight", "value_weight", "out_weight")
    assert {f"self_attn.{part}_quantizer" for part in parts} < set(report.weights)
    assert report.merged == {
        f"self_attn.{part}_quantizer": "self_attn.input_quantizer" for part in ("key", "value")
    }
    assert ("self_attn.softmax_quantizer" in ends(path, "QuantizeLinear")) == (
        target in ("onnxruntime", "openvino")
    )
    proof = torchq.verify_onnx(model, path, [x, torch.randn(2, 9, 16)])
    assert proof.ok, str(proof)
    assert proof.optimized[0].sqnr_db > 30
    kinds = [node.kind for node in torchq.inspect_onnx(path).integer]
    wanted = {"onnxruntime": 8, "openvino": 5}.get(
        target or "", 3
    )  # signed codes after ReLU, or forked, stay float there
    assert sum(kind in ("MatMulIntegerToFloat", "QLinearMatMul") for kind in kinds) >= wanted


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_separate_projections_and_extra_keys(dynamo: bool, tmp_path: Path) -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(
                12, 3, kdim=7, vdim=9, add_bias_kv=True, add_zero_attn=True
            )

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return self.attention(q, k, v)

    batch = {"q": torch.randn(4, 2, 12), "k": torch.randn(5, 2, 7), "v": torch.randn(5, 2, 9)}
    model = calibrated(Cross(), batch)
    torchq.export_onnx(model, batch, tmp_path / "m.onnx", dynamo=dynamo, dynamic_batch=False)
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [batch])
    assert report.ok and len(report.layers) == 8, str(report)
