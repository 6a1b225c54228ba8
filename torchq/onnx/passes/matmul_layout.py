"""Storing the weights of matrix products as runtimes read them: input features first."""

from __future__ import annotations

from typing import Any

import torch

from torchq.onnx.ir import Graph
from torchq.onnx.passes.cleanup import TRANSPOSED, attribute, axis_of
from torchq.onnx.passes.fold_shapes import known_shapes

__all__ = ["keep_products", "split_gemms", "store_transposed"]


def store_transposed(graph: Graph) -> None:
    """Store a weight as (in, out) where the graph transposes it, or where only the weight of a Gemm is quantized, in blocks.

    ``MatMul(x, DequantizeLinear(weight))`` with blocks along the input features is what ONNX Runtime turns into MatMulNBits; behind a
    Transpose, or in a Gemm, it would dequantize the weight on every call.
    """
    gone = []
    for node in graph.of("Transpose"):
        dequantize = _own_weight(graph, node.input[0])
        if dequantize is not None and list(attribute(node, "perm", [1, 0])) == [1, 0]:
            _transpose(graph, dequantize)
            graph.replace_uses(node.output[0], dequantize.output[0])
            gone.append(node)
    for node in graph.of("Gemm"):
        dequantize = _own_weight(graph, node.input[1])
        source = graph.producer(node.input[0])
        if (
            dequantize is None
            or not attribute(dequantize, "block_size", 0)
            or not _is_plain(node)
            or (source is not None and source.op_type == "DequantizeLinear")
        ):
            continue
        _straighten(graph, node, dequantize)
        gone.append(node)
        _split(graph, node)
    _without(graph, gone)


def split_gemms(graph: Graph) -> None:
    """MatMul and Add instead of each Gemm of integers whose result is not quantized, and such that they stay two.

    ONNX Runtime multiplies integers to floats in a MatMul alone; a Gemm would dequantize its weight on every call.
    """
    gone = []
    for node in graph.of("Gemm"):
        weight, source = _own_weight(graph, node.input[1]), graph.producer(node.input[0])
        if (
            weight is None
            or not _is_plain(node)
            or source is None
            or source.op_type != "DequantizeLinear"
            or _is_quantized(graph, node)
        ):
            continue
        _straighten(graph, node, weight)
        gone.append(node)
        _add_after(graph, node)
    _without(graph, gone)
    for add, index, rank in _sums(graph, flat=True):
        if not _is_quantized(graph, add):
            _add_in_front(graph, add, index, rank)
    graph.sort()


def keep_products(graph: Graph) -> None:
    """Store the bias that is added to the product with a quantized weight as (1, N), where the product has more dimensions than two.

    Where shapes are static, ONNX Runtime makes a Gemm of a MatMul and an Add of (N,) before it looks for quantized operands, and
    dequantizes the weight on every call then: a transformer took four times as long. The sum is the same in every runtime. A sum that is
    quantized right away stays: that Gemm runs on integers.
    """
    rows: dict[str, str] = {}
    for add, index, _ in _sums(graph, flat=False):
        add.input[index] = _widened(graph, add.input[index], 1, rows)
    graph.sort()
    graph.prune()


def _widened(graph: Graph, value: str, count: int, known: dict[str, str]) -> str:
    """``value`` with so many dimensions of length 1 in front; ``known`` are those that have them."""
    if value not in known:
        name = f"{value}/row"
        if value in graph.initializers:
            known[value] = graph.add_initializer(name, graph.value(value)[(None,) * count])
        else:
            known[value] = graph.fresh(name)
            graph.add(
                "Unsqueeze",
                [value, graph.add_initializer(f"{name}/axes", torch.arange(count))],
                known[value],
            )
    return known[value]


def _sums(graph: Graph, flat: bool) -> list[tuple[Any, int, int]]:
    """Each Add that a Gemm would take in, behind a product with a quantized weight; its other operand, and the dimensions of that.

    ``flat`` chooses products of two dimensions, whose Gemm takes a row or a matrix; of others it takes a row.
    """
    shapes = known_shapes(graph)
    found = []
    for product in graph.of("MatMul"):
        weight, readers = graph.producer(product.input[1]), graph.readers(product.output[0])
        while weight is not None and weight.op_type == "Transpose":
            weight = graph.producer(weight.input[0])
        if (
            weight is None
            or weight.op_type != "DequantizeLinear"
            or [reader.op_type for reader in readers] != ["Add"]
        ):
            continue
        index = int(readers[0].input[0] == product.output[0])
        rank, other = (
            len(shapes.get(name, ())) for name in (product.output[0], readers[0].input[index])
        )
        after = graph.readers(readers[0].output[0])
        if graph.is_output(product.output[0]) or (
            after and all(reader.op_type == "QuantizeLinear" for reader in after)
        ):
            continue
        if (rank, other) in ([(2, 1), (2, 2)] if flat else [(max(rank, 3), 1)]):
            found.append((readers[0], index, other))
    return found


def _straighten(graph: Graph, gemm: Any, weight: Any) -> None:
    """Store the weight as a MatMul wants it."""
    if attribute(gemm, "transB", 0):
        _transpose(graph, weight)


def _without(graph: Graph, gone: list[Any]) -> None:
    graph.remove(gone)
    graph.prune()
    graph.sort()


def _is_plain(node: Any) -> bool:
    return all(
        attribute(node, name, default) == default
        for name, default in (("alpha", 1.0), ("beta", 1.0), ("transA", 0))
    )


def _is_quantized(graph: Graph, node: Any) -> bool:
    """Whether every reader of the result, behind an activation that a quantizer takes in, is a QuantizeLinear."""
    readers = graph.readers(node.output[0])
    while len(readers) == 1 and readers[0].op_type in ("Relu", "Clip"):
        readers = graph.readers(readers[0].output[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _own_weight(graph: Graph, value: str) -> Any | None:
    """The DequantizeLinear of a stored matrix that only one node reads."""
    node = graph.producer(value)
    if (
        node is None
        or node.op_type != "DequantizeLinear"
        or node.input[0] not in graph.initializers
        or len(graph.readers(value)) != 1
    ):
        return None
    return node if len(graph.initializers[node.input[0]].dims) == 2 else None


def _transpose(graph: Graph, dequantize: Any) -> None:
    old = dequantize.input[0]
    kind = graph.initializers[old].data_type
    dequantize.input[0] = graph.add_initializer(
        old.removesuffix("/weight") + TRANSPOSED, graph.value(old).t().contiguous(), kind
    )
    for index in range(1, len(dequantize.input)):
        name = dequantize.input[index]
        if name and len(graph.initializers[name].dims) == 2:
            value, number = graph.value(name).t().contiguous(), graph.initializers[name].data_type
            dequantize.input[index] = graph.add_initializer(name, value, number)
    axis = axis_of(dequantize) % 2
    for entry in dequantize.attribute:
        if entry.name == "axis":
            entry.i = 1 - axis
    if (
        not any(entry.name == "axis" for entry in dequantize.attribute)
        and graph.initializers[dequantize.input[1]].dims
    ):
        dequantize.attribute.add(name="axis", i=1 - axis, type=2)
    graph.reindex()


def _split(graph: Graph, node: Any) -> None:
    """MatMul and Add instead of a Gemm.

    With a dimension in front that is taken away again: ONNX Runtime would make a Gemm of two-dimensional ones, before it looks for
    weights in blocks.
    """
    source, weight, *rest = node.input
    bias, result = [name for name in rest if name], str(node.output[0])
    del node.output[:]
    if not bias:
        graph.add("MatMul", [source, weight], result)
        return
    front = graph.add_initializer(f"{result}/front", torch.tensor([0]))
    names = [graph.fresh(f"{result}/{scale}") for scale in ("unsqueezed", "product", "sum")]
    graph.add("Unsqueeze", [source, front], names[0])
    graph.add("MatMul", [names[0], weight], names[1])
    graph.add("Add", [names[1], *bias], names[2])
    graph.add("Squeeze", [names[2], front], result)


def _add_after(graph: Graph, node: Any) -> None:
    """MatMul and Add instead of a Gemm; the bias with a dimension in front, or ONNX Runtime would make a Gemm of them again."""
    source, weight, *rest = node.input
    bias, result = [name for name in rest if name], str(node.output[0])
    del node.output[:]
    if not bias:
        graph.add("MatMul", [source, weight], result)
        return
    front = graph.add_initializer(f"{result}/front", torch.tensor([0, 1]))
    names = [graph.fresh(f"{result}/{scale}") for scale in ("product", "bias", "sum")]
    graph.add("MatMul", [source, weight], names[0])
    graph.add("Unsqueeze", [bias[0], front], names[1])
    graph.add("Add", names[:2], names[2])
    graph.add(
        "Squeeze", [names[2], graph.add_initializer(f"{result}/first", torch.tensor([0]))], result
    )


def _add_in_front(graph: Graph, add: Any, index: int, rank: int) -> None:
    """Let an Add with an operand of so many dimensions return three, of which the first is taken away again."""
    result = str(add.output[0])
    add.output[0] = graph.fresh(f"{result}/sum")
    add.input[index] = _widened(graph, add.input[index], 3 - rank, {})
    graph.add(
        "Squeeze",
        [add.output[0], graph.add_initializer(f"{result}/first", torch.tensor([0]))],
        result,
    )
    graph.reindex()
