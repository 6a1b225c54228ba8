"""Operators into which ONNX Runtime fuses others, and attention, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees
from torchq.errors import FrontendError

MS: dict[str, Any] = {"domain": "com.microsoft"}
GENERATOR = torch.Generator().manual_seed(3)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", []), ("LeakyRelu", [0.2]), ("Clip", [-0.1, 0.4]), ("HardSigmoid", [0.3, 0.4])],
)
def test_fused_layers(activation: str, parameters: list[float]) -> None:
    w = Writer(13)
    x = w.input("x", [2, 4, 5, 5])
    options: dict[str, Any] = {"activation": activation, **MS}
    conv = dict(options, activation_params=parameters) if parameters else options
    y = w.node("FusedConv", x, w.random(4, 4, 3, 3), w.random(4), pads=[1] * 4, **conv)
    if activation == "Relu":
        y = w.node("FusedConv", y, w.random(4, 4, 3, 3), w.random(4), x, pads=[1] * 4, **conv)
    named = dict(zip(("activation_alpha", "activation_beta"), parameters, strict=False))
    gemm = {} if activation in ("Relu", "Clip") else named
    options = options if activation != "Clip" else {**MS, "activation": "Relu"}
    z = w.node("FusedGemm", w.node("Flatten", y), w.random(100, 6), w.random(6), **gemm, **options)
    read = assert_agrees(w.model(z, y), {"x": random(2, 4, 5, 5)})
    assert any(type(module) is nn.Conv2d for module in read.modules())


def test_fused_products_and_activations() -> None:
    w = Writer(13)
    x = w.input("x", [2, 3, 4, 6])
    y = w.node("FusedMatMul", x, x, transA=1, alpha=0.5, **MS)
    y = w.node("FusedMatMul", y, y, transB=1, **MS)
    for op_type in ("Gelu", "QuickGelu"):
        y = w.node(op_type, y, **MS)
    y = w.node("FastGelu", w.node("BiasGelu", y, w.random(6), **MS), w.random(6), **MS)
    # Behind operators that shape inference does not know, products are still those of floats.
    y = w.node("MatMul", y, w.random(6, 5))
    read = assert_agrees(w.model(y), {"x": random(2, 3, 4, 6)})
    assert any(type(module) is nn.Linear for module in read.modules())


def test_norms_with_what_they_add() -> None:
    w = Writer(13)
    tokens = w.input("tokens", ["n", 5], torch.int32)
    segments = w.input("segments", ["n", 5], torch.int32)
    mask = w.input("mask", ["n", 5], torch.int32)
    tables = [w.random(rows, 8) for rows in (20, 7, 2)]
    scales = [w.random(8) for _ in range(4)]
    x, counts = w.node(
        "EmbedLayerNormalization", tokens, segments, *tables, *scales[:2], mask, outputs=2, **MS
    )
    y = w.node("SkipLayerNormalization", x, x, *scales[2:], w.random(8), **MS)
    y = w.node("SkipSimplifiedLayerNormalization", y, x, scales[0], **MS)
    ones = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.int32)
    numbers = torch.randint(0, 20, (2, 5), generator=GENERATOR, dtype=torch.int32)
    feeds = {"tokens": numbers, "segments": ones, "mask": ones}
    read = assert_agrees(w.model(y, (counts, torch.int32)), feeds)
    assert sum(type(module) is nn.Embedding for module in read.modules()) == 3


@pytest.mark.parametrize("masked", ["", "counts", "keys"])
def test_attention_of_onnx_runtime(masked: str) -> None:
    w = Writer(13)
    x = w.input("x", [2, 5, 8])
    feeds = {"x": random(2, 5, 8)}
    mask = ""
    if masked:
        values = torch.tensor([3, 5]) if masked == "counts" else torch.ones(2, 5).triu()
        feeds["mask"] = values.to(torch.int32)
        mask = w.input("mask", values.shape, torch.int32)
    parts = [x, w.random(8, 24), w.random(24), *([mask] if mask else [])]
    y = w.node("Attention", *parts, num_heads=2, **MS)
    causal = w.node("Attention", x, w.random(8, 24), w.random(24), num_heads=2, unidirectional=1,
                    **MS)  # fmt: skip
    z = w.node("MultiHeadAttention", y, x, causal, w.random(24), *([mask] if mask else []),
               num_heads=2, **MS)  # fmt: skip
    read = assert_agrees(w.model(y, z), feeds)
    assert sum(type(module) is nn.Linear for module in read.modules()) == 2


def test_attention_of_onnx_is_one_call_where_torch_has_it() -> None:
    w = Writer(23)
    q, k, v = (w.input(name, [2, 4, 8]) for name in "qkv")
    y = w.node("Attention", q, k, v, q_num_heads=2, kv_num_heads=2)
    feeds = {name: random(2, 4, 8) for name in "qkv"}
    read = assert_agrees(w.model(y), feeds)
    names = {getattr(node.target, "__name__", "") for node in read.graph.nodes}
    assert "scaled_dot_product_attention" in names


def test_what_the_fused_operators_do_not_have_is_refused() -> None:
    w = Writer(13)
    x = w.input("x", [2, 5, 8])
    y = w.node("Attention", x, w.random(8, 24), w.random(24), "", "x", num_heads=2, **MS)
    with pytest.raises(FrontendError, match="a cache, sizes of their own, or rotary positions"):
        torchq.from_onnx(w.model(y))
