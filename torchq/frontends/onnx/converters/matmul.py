"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.convolutions import shifted
from torchq.frontends.onnx.converters.quantization import weighted
from torchq.frontends.onnx.registry import converter
from torchq.frontends.onnx.values import Constant, Value

__all__: list[str] = []


def _linear(node: NodeContext, weight: Constant, transposed: bool, bias: Constant | None) -> Value:
    """Return a call of a linear layer; ``transposed`` says that the constant is (in, out)."""
    tensor = weight.tensor.t() if transposed else weight.tensor
    module = nn.Linear(tensor.shape[1], tensor.shape[0], bias is not None, device="meta")
    module.weight = node.importer.parameter(weight, "transposed" if transposed else "", tensor)
    if bias is not None:
        module.bias = node.importer.parameter(bias)
    return weighted(node, module, weight, node.inputs[0], transposed)


@converter("MatMul")
def _matmul(node: NodeContext) -> Value:
    weight, shape = node.inputs[1], node.shape(0)
    is_matrix = isinstance(weight, Constant) and weight.tensor.dim() == 2
    if is_matrix and weight.tensor.is_floating_point() and shape is not None and shape:  # type: ignore[union-attr]
        return _linear(node, weight, True, None)  # type: ignore[arg-type]
    if not node.floating(0):
        return node.call(integer_matmul, *node.inputs)
    return node.call(torch.matmul, *node.inputs)


@converter("Gemm")
def _gemm(node: NodeContext) -> Value:
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    weight, bias, plain = node.inputs[1], node.input(2), not node.attr("transA", 0)
    is_bias = bias is None or (isinstance(bias, Constant) and bias.tensor.dim() == 1)
    if alpha == 1.0 and (beta == 1.0 or bias is None) and plain and isinstance(weight, Constant) and is_bias:
        out = weight.tensor.shape[0 if node.attr("transB", 0) else 1]
        if weight.tensor.is_floating_point() and (bias is None or bias.tensor.numel() == out):  # type: ignore[union-attr]
            return _linear(node, weight, not node.attr("transB", 0), bias)  # type: ignore[arg-type]
    transposed = bool(node.attr("transA", 0)), bool(node.attr("transB", 0))
    return node.call(gemm, node.inputs[0], weight, bias, alpha, beta, *transposed)


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, trans_a: bool, trans_b: bool
) -> Tensor:
    """Return ``alpha * a @ b + beta * c`` of matrices that may be transposed before."""
    y = (a.t() if trans_a else a) @ (b.t() if trans_b else b)
    y = y if alpha == 1.0 else (y * alpha).to(y.dtype)
    if c is None:
        return y
    return y + (c if beta == 1.0 else (c * beta).to(y.dtype))


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of integer matrices in their element type, modulo its range."""
    return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)


@converter("MatMulInteger")
def _matmul_integer(node: NodeContext) -> Value:
    a = node.call(shifted, node.inputs[0], node.input(2), -2)
    b = node.call(shifted, node.inputs[1], node.input(3), -1)
    return node.call(torch.Tensor.to, node.call(torch.matmul, a, b), torch.int32)


@converter("Einsum")
def _einsum(node: NodeContext) -> Value:
    return node.call(torch.einsum, node.required("equation").replace(" ", ""), list(node.inputs))
