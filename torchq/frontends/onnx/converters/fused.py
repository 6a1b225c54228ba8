"""Float operators into which ONNX Runtime fuses others: the domain com.microsoft.

Reference: ContribOperators.md of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.quantization import module_name
from torchq.frontends.onnx.qoperators import MICROSOFT
from torchq.frontends.onnx.registry import CONVERTERS, converter

__all__ = ["fused_matmul", "quick_gelu"]

_ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "Relu": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "LeakyRelu": nn.LeakyReLU,
    "Clip": nn.Hardtanh,
    "HardSwish": nn.Hardswish,
}


def _as_plain(node: NodeContext, op_type: str) -> Value:
    """Convert a node as the operator of ONNX that it extends."""
    result: Any = CONVERTERS["", op_type].convert(node)
    return result


def _activated(node: NodeContext, value: Value, parameters: list[float]) -> Value:
    """Put the activation of a fused operator behind it."""
    name = node.attr("activation", "")
    if not name:
        return value
    if name == "HardSigmoid":
        alpha, beta = parameters or [0.2, 0.5]
        scaled = node.call(torch.add, node.call(torch.mul, value, alpha), beta)
        return node.call(torch.clamp, scaled, 0, 1)
    if name not in _ACTIVATIONS:
        node.refuse(f"the activation {name!r} is not known")
    return node.module(_ACTIVATIONS[name](*parameters), value, name=f"{node.name}_{name}")


@converter("FusedConv", domain=MICROSOFT)
def _conv(node: NodeContext) -> Value:
    added = node.input(3)
    del node.inputs[3:]
    result = _as_plain(node, "Conv")
    if added is not None:
        result = node.call(torch.add, result, added)
    return _activated(node, result, list(node.attr("activation_params", [])))


@converter("FusedGemm", domain=MICROSOFT)
def _gemm(node: NodeContext) -> Value:
    result = _as_plain(node, "Gemm")
    names = {"LeakyRelu": ["alpha"], "HardSigmoid": ["alpha", "beta"]}
    wanted = names.get(node.attr("activation", ""), [])
    parameters = [node.attributes.get(f"activation_{name}") for name in wanted]
    return _activated(node, result, [p for p in parameters if p is not None])


@converter("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def _matmul(node: NodeContext) -> Value:
    flags = [bool(node.attr(n, 0)) for n in ("transA", "transB", "transBatchA", "transBatchB")]
    alpha, weight = node.attr("alpha", 1.0), node.constant(1)
    if alpha == 1.0 and not any(flags) and weight is not None:
        return _as_plain(node, "MatMul")
    return node.call(fused_matmul, *node.inputs, alpha, *flags)


def fused_matmul(
    a: Tensor, b: Tensor, alpha: float, trans_a: bool, trans_b: bool, batch_a: bool, batch_b: bool
) -> Tensor:
    """Return ``alpha * a @ b``.

    ``batch_a`` says that the first dimension of ``a`` belongs behind its others but the last;
    ``trans_a`` exchanges the last two.
    """
    a, b = (x.movedim(0, -2) if flag else x for x, flag in ((a, batch_a), (b, batch_b)))
    a = a.transpose(-1, -2) if trans_a and a.dim() > 1 else a
    b = b.transpose(-1, -2) if trans_b and b.dim() > 1 else b
    return torch.matmul(a, b) if alpha == 1.0 else torch.matmul(a, b) * alpha


@converter("Gelu", "BiasGelu", "FastGelu", domain=MICROSOFT)
def _gelu(node: NodeContext) -> Value:
    x = node.inputs[0]
    if node.input(1) is not None:
        x = node.call(torch.add, x, node.inputs[1])
    kind = "tanh" if node.op_type == "FastGelu" else "none"
    return node.module(nn.GELU(kind), x)


@converter("QuickGelu", domain=MICROSOFT)
def _quick_gelu(node: NodeContext) -> Value:
    return node.call(quick_gelu, node.inputs[0], node.attr("alpha", 1.702))


def quick_gelu(x: Tensor, alpha: float) -> Tensor:
    """Return ``x * sigmoid(alpha * x)``."""
    return x * torch.sigmoid(alpha * x)


def _norm(node: NodeContext, x: Value, gamma: Value, beta: Value, simple: bool) -> Value:
    """Return a call of a norm over the last dimension, a module where its weights are known."""
    epsilon = node.attr("epsilon", 1e-12 if "Embed" in node.op_type else 1e-5)
    if isinstance(gamma, Constant) and isinstance(beta, (Constant, type(None))):
        size = list(gamma.tensor.shape)
        norm = nn.RMSNorm(size, epsilon) if simple else nn.LayerNorm(size, epsilon)
        norm.weight = node.builder.parameter(gamma)
        if not simple:
            assert isinstance(norm, nn.LayerNorm)
            norm.bias = None if beta is None else node.builder.parameter(beta)  # type: ignore[assignment]
        return node.module(norm, x, name=module_name(node, gamma))
    node.refuse("its weight is computed by the network; expected a constant")


@converter("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_norm(node: NodeContext) -> list[Value]:
    simple = "Simplified" in node.op_type
    total = node.call(torch.add, node.inputs[0], node.inputs[1])
    bias = node.input(3 if simple else 4)
    if bias is not None:
        total = node.call(torch.add, total, bias)
    result = _norm(node, total, node.inputs[2], None if simple else node.input(3), simple)
    if any(node.output_names[1:3]):
        node.refuse("its means and deviations are not supported")
    return [result, None, None, total][: max(1, len(node.output_names))]


@converter("SimplifiedLayerNormalization")
def _simplified_norm(node: NodeContext) -> Value:
    return _as_plain(node, "RMSNormalization")


@converter("EmbedLayerNormalization", domain=MICROSOFT)
def _embed_norm(node: NodeContext) -> list[Value]:
    tokens, segments, words, places, kinds, gamma, beta, mask, positions = (
        node.input(index) for index in range(9)
    )
    if positions is None:
        positions = node.call(_positions, tokens)
    total = node.call(
        torch.add, _looked_up(node, words, tokens), _looked_up(node, places, positions)
    )
    if segments is not None:
        total = node.call(torch.add, total, _looked_up(node, kinds, segments))
    counts = None
    if len(node.output_names) > 1 and node.output_names[1]:
        counts = node.call(_valid, tokens, mask)
    return [_norm(node, total, gamma, beta, False), counts, total][: len(node.output_names)]


def _looked_up(node: NodeContext, table: Value, places: Value) -> Value:
    if not isinstance(table, Constant):
        node.refuse("its table is computed by the network; expected a constant")
    rows, size = table.tensor.shape
    module = nn.Embedding(rows, size, device="meta")
    module.weight = node.builder.parameter(table)
    return node.module(module, places, name=module_name(node, table))


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def _valid(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return how many tokens of each sequence are valid; none where there is no mask."""
    if mask is None:
        return torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    return mask.sum(1, dtype=torch.int32)
