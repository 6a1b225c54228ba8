"""Matrix products for ONNX Runtime: integers to a float result are multiplied in a MatMul."""

from __future__ import annotations

from torchq.onnx.ir import (
    Model,
    Node,
    add_node,
    add_numbers,
    attribute,
    computed_by,
    input_at,
    nodes_of,
    readers,
    remove_unused,
    replace_value,
)
from torchq.onnx.passes.matmuls import (
    adds_behind_matmuls,
    own_matrix,
    transpose_stored,
    with_leading_ones,
)
from torchq.onnx.passes.pairs import insert_pair
from torchq.onnx.qdq import leads_only_to_quantizers, stored_weight
from torchq.runtimes.onnxruntime.pairs import MOVES


def split_gemms(model: Model) -> None:
    """Write integer Gemms as MatMul and Add where their result is not quantized.

    ONNX Runtime multiplies integers to a float result in a MatMul alone; a Gemm would dequantize
    its weight on every call.

    Before: Gemm of quantized operands, with a float result.
    After: MatMul, and an Add that ONNX Runtime does not fuse with it to a Gemm again.
    """
    for node in nodes_of(model, "Gemm"):
        weight = own_matrix(node.inputs[1])
        source = computed_by(node.inputs[0], "DequantizeLinear")
        if (
            weight is None
            or source is None
            or not _is_plain(node)
            or leads_only_to_quantizers(node.outputs[0], "Relu", "Clip")
        ):
            continue
        if attribute(node, "transB", 0):
            transpose_stored(weight)
        _as_matmul_and_add(node)
    remove_unused(model)
    for add, index, ndim in list(adds_behind_matmuls(model, two_dimensional=True)):
        if not leads_only_to_quantizers(add.outputs[0], "Relu", "Clip"):
            _add_in_three_dimensions(add, index, ndim)


def quantize_moved_rows(model: Model) -> None:
    """Quantize what products read once more behind operators that only move it.

    A recurrent layer quantizes its input as a whole, and multiplies its steps as one matrix. ONNX
    Runtime has kernels for products that read codes directly, and moves no codes through Flatten.

    Before: DequantizeLinear -> moves -> Gemm or MatMul with a quantized weight.
    After: A Q/DQ pair with the same parameters stands in front of the product; no value changes.
    """
    for node in nodes_of(model, "Gemm", "MatMul"):
        mover = computed_by(node.inputs[0], *MOVES)
        source = mover
        while source is not None and source.op_type in MOVES:
            source = source.inputs[0].producer()
        if mover is None or source is None or source.op_type != "DequantizeLinear":
            continue
        # Both directions of a recurrent layer read one matrix.
        is_read_by_products = all(
            _is_product(user) for user in readers(mover.outputs[0])
        )
        if is_read_by_products and not attribute(source, "axis"):
            insert_pair(mover, list(source.inputs[1:]))


def _is_product(node: Node) -> bool:
    """Return True for a product with a quantized weight."""
    is_product = node.op_type in ("Gemm", "MatMul")
    return is_product and stored_weight(node.inputs[1]) is not None


def _is_plain(gemm: Node) -> bool:
    """Return True if a Gemm has no factors and does not transpose its first operand."""
    defaults = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    return all(
        attribute(gemm, name, default) == default for name, default in defaults.items()
    )


def _as_matmul_and_add(gemm: Node) -> None:
    """Write a Gemm as MatMul and Add; the bias gets two leading dimensions of length 1.

    ONNX Runtime would make a Gemm again if the bias had fewer dimensions.
    """
    x, weight = gemm.inputs[:2]
    bias = input_at(gemm, 2)
    name = str(gemm.outputs[0].name)
    result = add_node(gemm, "MatMul", [x, weight], f"{name}/product")
    if bias is not None:
        front = add_numbers(gemm.graph, f"{name}/front", [0, 1])
        first = add_numbers(gemm.graph, f"{name}/first", [0])
        lifted = add_node(result.producer(), "Unsqueeze", [bias, front], f"{name}/bias")
        total = add_node(lifted.producer(), "Add", [result, lifted], f"{name}/sum")
        result = add_node(
            total.producer(), "Squeeze", [total, first], f"{name}/squeezed"
        )
    replace_value(gemm.outputs[0], result)


def _add_in_three_dimensions(add: Node, index: int, ndim: int) -> None:
    """Let an Add return three dimensions, and remove the first one behind it."""
    result = add.outputs[0]
    name = str(add.outputs[0].name)
    operand = with_leading_ones(add, add.inputs[index], 3 - ndim, {})
    operands = [operand, add.inputs[1 - index]]
    total = add_node(add, "Add", operands[:: 1 if index == 0 else -1], f"{name}/sum")
    first = add_numbers(add.graph, f"{name}/first", [0])
    squeezed = add_node(total.producer(), "Squeeze", [total, first], f"{name}/squeezed")
    replace_value(result, squeezed)
