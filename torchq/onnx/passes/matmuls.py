"""Weights of matrix multiplications in the layout that runtimes read: input features first."""

from __future__ import annotations

from collections.abc import Iterator

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_numbers,
    attribute,
    data_type,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    readers,
    remove_unused,
    replace_value,
    set_attribute,
    value_of,
)
from torchq.onnx.passes.constants import known_shapes
from torchq.onnx.qdq import axis_of, leads_only_to_quantizers, stored_weight

#: Ends the names of weights that are stored transposed.
TRANSPOSED = "/weight.T"


def store_transposed(model: Model) -> None:
    """Store weights as (in, out) where the graph transposes them at run time.

    Before: ``MatMul(x, Transpose(DequantizeLinear(weight)))``.
    After: ``MatMul(x, DequantizeLinear(weight.T))``. Behind a Transpose ONNX Runtime would
    dequantize the weight on every call.
    """
    for node in nodes_of(model, "Transpose"):
        dequantize = own_matrix(node.inputs[0])
        if dequantize is not None and list(attribute(node, "perm", [1, 0])) == [1, 0]:
            transpose_stored(dequantize)
            replace_value(node.outputs[0], dequantize.outputs[0])
    remove_unused(model)


def keep_integer_matmuls(model: Model) -> None:
    """Store a bias that is added to a product with a quantized weight as (1, N).

    With static shapes ONNX Runtime makes a Gemm of a MatMul and an Add of (N,) before it looks for
    quantized operands, and then dequantizes the weight on every call: a transformer took four
    times as long. The result is the same in every runtime.

    Before: ``Add(MatMul(x, DequantizeLinear(w)), bias)``, x of three or more dimensions, bias (N,).
    After: The bias is (1, N). An Add whose result is quantized at once keeps (N,), because that
    Gemm runs on integers.
    """
    rows: dict[Value, Value] = {}
    for add, index, _ in list(adds_behind_matmuls(model, two_dimensional=False)):
        add.replace_input_with(
            index, with_leading_ones(add, add.inputs[index], 1, rows)
        )
    model.graph.sort()


def with_leading_ones(
    add: Node, value: Value, count: int, known: dict[Value, Value]
) -> Value:
    """Return ``value`` with ``count`` dimensions of length 1 in front; ``known`` is a cache."""
    if value not in known:
        name = f"{value.name}/row"
        if is_constant(value):
            known[value] = add_initializer(
                add.graph, name, value_of(value)[(None,) * count]
            )
        else:
            axes = add_numbers(add.graph, f"{name}/axes", range(count))
            node = onnx_ir.node("Unsqueeze", [value, axes], name=name)
            node.outputs[0].name = name
            add.prepend(node)
            known[value] = node.outputs[0]
    return known[value]


def adds_behind_matmuls(
    model: Model, two_dimensional: bool
) -> Iterator[tuple[Node, int, int]]:
    """Yield each Add that ONNX Runtime would fuse with a MatMul of a quantized weight to a Gemm.

    To two-dimensional products it adds a row or a matrix, to others a row. With each Add come the
    index of its other operand and the number of dimensions of that.
    """
    matmuls = nodes_of(model, "MatMul")
    shapes = known_shapes(model) if matmuls else {}
    for matmul in matmuls:
        weight = matmul.inputs[1].producer()
        product = matmul.outputs[0]
        while weight is not None and weight.op_type == "Transpose":
            weight = weight.inputs[0].producer()
        users = readers(product)
        if weight is None or weight.op_type != "DequantizeLinear" or is_output(product):
            continue
        if [user.op_type for user in users] != ["Add"]:
            continue
        index = int(users[0].inputs[0] is product)
        ndim = len(shapes.get(product.name, ()))
        other = len(shapes.get(users[0].inputs[index].name, ()))
        if leads_only_to_quantizers(users[0].outputs[0]):
            continue
        fits = (
            ndim == 2 and other in (1, 2)
            if two_dimensional
            else ndim >= 3 and other == 1
        )
        if fits:
            yield users[0], index, other


def own_matrix(value: Value) -> Node | None:
    """Return the DequantizeLinear of a stored matrix that one node alone reads."""
    node = stored_weight(value)
    if node is None or len(readers(value)) != 1:
        return None
    return node if len(node.inputs[0].const_value.shape) == 2 else None


def transpose_stored(dequantize: Node) -> None:
    """Store a matrix and its scales transposed."""
    graph = dequantize.graph
    old = dequantize.inputs[0]
    name = str(old.name).removesuffix("/weight") + TRANSPOSED
    for index, value in enumerate(dequantize.inputs):
        if value is not None and len(value.const_value.shape) == 2:
            new = add_initializer(
                graph,
                name if index == 0 else str(value.name),
                value_of(value).t(),
                data_type(value),
            )
            dequantize.replace_input_with(index, new)
    dequantize.outputs[0].shape = None
    if len(dequantize.inputs[1].const_value.shape):
        axis = 1 - axis_of(dequantize) % 2
        set_attribute(dequantize, "axis", axis)
