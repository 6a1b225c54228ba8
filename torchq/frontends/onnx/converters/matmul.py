"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.convolutions import shifted
from torchq.frontends.onnx.converters.quantization import weighted
from torchq.frontends.onnx.registry import converter

__all__ = ["gemm", "integer_matmul"]


def _linear(node: NodeContext, weight: Constant, transposed: bool, bias: Constant | None) -> Value:
    """Return a call of a linear layer; ``transposed`` says that the constant is (in, out)."""
    tensor = weight.tensor.t() if transposed else weight.tensor
    module = nn.Linear(tensor.shape[1], tensor.shape[0], bias is not None, device="meta")
    module.weight = node.builder.parameter(weight, "transposed" if transposed else "", tensor)
    if bias is not None:
        module.bias = node.builder.parameter(bias)
    return weighted(node, module, weight, node.inputs[0], transposed)


@converter("MatMul")
def _matmul(node: NodeContext) -> Value:
    weight = node.inputs[1]
    if (
        isinstance(weight, Constant)
        and weight.tensor.dim() == 2
        and node.floating(0)
        and node.shape(0)
    ):
        return _linear(node, weight, True, None)
    if not node.floating(0):
        return node.call(integer_matmul, *node.inputs)
    return node.call(torch.matmul, *node.inputs)


@converter("Gemm")
def _gemm(node: NodeContext) -> Value:
    weight, bias = node.inputs[1], node.input(2)
    transposed = bool(node.attr("transA", 0)), bool(node.attr("transB", 0))
    if _is_linear(node) and isinstance(weight, Constant):
        return _linear(
            node, weight, not transposed[1], bias if isinstance(bias, Constant) else None
        )
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    return node.call(gemm, node.inputs[0], weight, bias, alpha, beta, *transposed)


def _is_linear(node: NodeContext) -> bool:
    """Return True for a product that a linear layer computes: known weight and bias, no factors."""
    weight, bias = node.inputs[1], node.input(2)
    if not isinstance(weight, Constant) or not weight.tensor.is_floating_point():
        return False
    if node.attr("transA", 0) or node.attr("alpha", 1.0) != 1.0:
        return False
    if bias is None:
        return True
    out = weight.tensor.shape[0 if node.attr("transB", 0) else 1]
    is_vector = isinstance(bias, Constant) and tuple(bias.tensor.shape) == (out,)
    return is_vector and node.attr("beta", 1.0) == 1.0


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
    if a.is_floating_point():  # the file does not tell the type
        return torch.matmul(a, b)
    return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)


@converter("MatMulInteger")
def _matmul_integer(node: NodeContext) -> Value:
    a = node.call(shifted, node.inputs[0], node.input(2), -2)
    b = node.call(shifted, node.inputs[1], node.input(3), -1)
    return node.call(torch.Tensor.to, node.call(torch.matmul, a, b), torch.int32)


@converter("Einsum")
def _einsum(node: NodeContext) -> Value:
    return node.call(torch.einsum, node.required("equation").replace(" ", ""), list(node.inputs))
