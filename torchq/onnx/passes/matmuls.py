"""Weights of matrix multiplications in the layout that runtimes read: input features first."""

from __future__ import annotations

from collections.abc import Iterator

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    add_numbers,
    attribute,
    computed_by,
    data_type,
    input_at,
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
        dequantize = _own_matrix(node.inputs[0])
        if dequantize is not None and list(attribute(node, "perm", [1, 0])) == [1, 0]:
            _transpose(dequantize)
            replace_value(node.outputs[0], dequantize.outputs[0])
    remove_unused(model)


def split_gemms(model: Model) -> None:
    """Write integer Gemms as MatMul and Add where their result is not quantized.

    ONNX Runtime multiplies integers to a float result in a MatMul alone; a Gemm would dequantize
    its weight on every call.

    Before: Gemm of quantized operands, with a float result.
    After: MatMul, and an Add that ONNX Runtime does not fuse with it to a Gemm again.
    """
    for node in nodes_of(model, "Gemm"):
        weight = _own_matrix(node.inputs[1])
        source = computed_by(node.inputs[0], "DequantizeLinear")
        if (
            weight is None
            or source is None
            or not _is_plain(node)
            or leads_only_to_quantizers(node.outputs[0], "Relu", "Clip")
        ):
            continue
        if attribute(node, "transB", 0):
            _transpose(weight)
        _as_matmul_and_add(node)
    remove_unused(model)
    for add, index, ndim in list(_adds_behind_matmuls(model, two_dimensional=True)):
        if not leads_only_to_quantizers(add.outputs[0], "Relu", "Clip"):
            _add_in_three_dimensions(add, index, ndim)


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
    for add, index, _ in list(_adds_behind_matmuls(model, two_dimensional=False)):
        add.replace_input_with(index, _with_leading_ones(add, add.inputs[index], 1, rows))
    model.graph.sort()


def _with_leading_ones(add: Node, value: Value, count: int, known: dict[Value, Value]) -> Value:
    """Return ``value`` with ``count`` dimensions of length 1 in front; ``known`` is a cache."""
    if value not in known:
        name = f"{value.name}/row"
        if is_constant(value):
            known[value] = add_initializer(add.graph, name, value_of(value)[(None,) * count])
        else:
            axes = add_numbers(add.graph, f"{name}/axes", range(count))
            node = onnx_ir.node("Unsqueeze", [value, axes], name=name)
            node.outputs[0].name = name
            add.prepend(node)
            known[value] = node.outputs[0]
    return known[value]


def _adds_behind_matmuls(model: Model, two_dimensional: bool) -> Iterator[tuple[Node, int, int]]:
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
        fits = ndim == 2 and other in (1, 2) if two_dimensional else ndim >= 3 and other == 1
        if fits:
            yield users[0], index, other


def _is_plain(gemm: Node) -> bool:
    """Return True if a Gemm has no factors and does not transpose its first operand."""
    defaults = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    return all(attribute(gemm, name, default) == default for name, default in defaults.items())


def _own_matrix(value: Value) -> Node | None:
    """Return the DequantizeLinear of a stored matrix that one node alone reads."""
    node = stored_weight(value)
    if node is None or len(readers(value)) != 1:
        return None
    return node if len(node.inputs[0].const_value.shape) == 2 else None


def _transpose(dequantize: Node) -> None:
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
        result = add_node(total.producer(), "Squeeze", [total, first], f"{name}/squeezed")
    replace_value(gemm.outputs[0], result)


def _add_in_three_dimensions(add: Node, index: int, ndim: int) -> None:
    """Let an Add return three dimensions, and remove the first one behind it."""
    result = add.outputs[0]
    name = str(add.outputs[0].name)
    operand = _with_leading_ones(add, add.inputs[index], 3 - ndim, {})
    operands = [operand, add.inputs[1 - index]]
    total = add_node(add, "Add", operands[:: 1 if index == 0 else -1], f"{name}/sum")
    first = add_numbers(add.graph, f"{name}/first", [0])
    squeezed = add_node(total.producer(), "Squeeze", [total, first], f"{name}/squeezed")
    replace_value(result, squeezed)
