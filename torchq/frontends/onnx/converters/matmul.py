"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.converters.convolutions import shifted
from torchq.frontends.onnx.converters.quantization import weighted
from torchq.frontends.onnx.registry import converter


def _linear(
    node: NodeContext,
    x: Value,
    weight: Constant,
    transposed: bool,
    bias: Constant | None,
    factors: tuple[float, float] = (1.0, 1.0),
) -> Value:
    """Return a call of a linear layer.

    Args:
        node: the product.
        x: its first operand.
        weight: its second operand.
        transposed: the constant is (in, out).
        bias: (out,), or one number for all.
        factors: of the weight and of the bias.
    """
    tensor = weight.tensor.t() if transposed else weight.tensor
    key = "transposed" if transposed else ""
    module = nn.Linear(tensor.shape[1], tensor.shape[0], bias is not None, device="meta")
    module.weight = node.builder.parameter(weight, *_scaled(key, tensor, factors[0]))
    if bias is not None:
        vector = bias.tensor.reshape(-1).expand(tensor.shape[0])
        module.bias = node.builder.parameter(bias, *_scaled("", vector, factors[1]))
    return weighted(node, module, weight, x, transposed)


def _scaled(key: str, tensor: Tensor, factor: float) -> tuple[str, Tensor]:
    """Return a form of a parameter and its key, with a factor in both."""
    return (key, tensor) if factor == 1.0 else (f"{key} * {factor}", tensor * factor)


@converter("MatMul")
def _matmul(node: NodeContext) -> Value:
    weight = node.inputs[1]
    if (
        isinstance(weight, Constant)
        and weight.tensor.dim() == 2
        and node.floating(0)
        and node.shape(0)
    ):
        return _linear(node, node.inputs[0], weight, True, None)
    if not node.floating(0):
        return node.call(integer_matmul, *node.inputs)
    return node.call(torch.matmul, *node.inputs)


@converter("Gemm")
def _gemm(node: NodeContext) -> Value:
    x, weight, bias = node.inputs[0], node.inputs[1], node.input(2)
    transposed = bool(node.attr("transA", 0)), bool(node.attr("transB", 0))
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    if _is_linear(node) and isinstance(weight, Constant):
        x = node.call(torch.t, x) if transposed[0] else x
        own = bias if isinstance(bias, Constant) else None
        return _linear(node, x, weight, not transposed[1], own, (alpha, beta))
    return node.call(gemm, x, weight, bias, alpha, beta, *transposed)


def _is_linear(node: NodeContext) -> bool:
    """Return True for a product that a linear layer computes: known weight and bias."""
    weight, bias = node.inputs[1], node.input(2)
    if not isinstance(weight, Constant) or not weight.tensor.is_floating_point():
        return False
    if node.attr("alpha", 1.0) != 1.0 and weight in node.builder.weights:
        return False  # the codes of the file would have another scale
    if bias is None:
        return True
    out = weight.tensor.shape[0 if node.attr("transB", 0) else 1]
    return (
        isinstance(bias, Constant)
        and bias.tensor.numel() in (1, out)
        and tuple(bias.tensor.shape[-1:]) in ((), (1,), (out,))
        and bias.tensor.numel() == (bias.tensor.shape[-1] if bias.tensor.dim() else 1)
    )


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
