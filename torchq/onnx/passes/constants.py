"""Stored tensors and known lengths: what follows from them is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    Value,
    add_initializer,
    add_numbers,
    are_constant,
    attribute,
    computed_by,
    data_type,
    is_constant,
    is_output,
    names,
    nodes_of,
    onnx_ir,
    remove_unused,
    replace_value,
    serde,
    stored_proto,
    value_of,
)
from torchq.utils.optional import OptionalModule

_onnx: Any = OptionalModule("onnx", "torchq.onnx")
_helper: Any = OptionalModule("onnx.helper", "torchq.onnx")
_reference: Any = OptionalModule("onnx.reference", "torchq.onnx")
_passes: Any = OptionalModule("onnx_ir.passes.common", "torchq.onnx")
#: The length of each dimension; a name, or None, where it is only known when the file runs.
Shape: TypeAlias = tuple[int | str | None, ...]
#: A domain whose operators shape inference leaves alone.
_UNKNOWN = "torchq.unknown"
_SMALL = 64  # Elements. Shapes, indexes and factors are smaller; weights are not.
_ARITHMETIC = names(
    "Cast Sqrt Div Mul Add Sub Mod Reshape Unsqueeze Squeeze Concat Slice Gather Pow Reciprocal "
    "Abs Neg Ceil Floor Clip Max Min Transpose"
)
#: What the TorchScript exporter writes beside, to choose between lengths.
_CHOICES = names(
    "Where Equal Expand Range And Or Not Greater GreaterOrEqual Less LessOrEqual"
)
#: Operators, with the number that leaves the other operand as it is.
_NEUTRAL = {"Add": 0, "Div": 1, "Mul": 1, "Sub": 0}
_NUMERIC = frozenset(["FLOAT", "DOUBLE", "INT32", "INT64", "BOOL"])


def lift_constants(model: Model) -> None:
    """Turn Constant nodes into initializers, so that passes see one kind of constant.

    Before: Any graph.
    After: The only Constant nodes are those whose value is an output of the model.
    """
    _passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(
        model
    )


def fold_slices(model: Model) -> None:
    """Compute slices and copies of stored tensors.

    Before: A bias of packed projections is a Slice of a stored tensor; a parameter with two names
    is an Identity of one.
    After: Both are initializers.
    """
    for node in nodes_of(model, "Slice", "Identity"):
        if not are_constant(node.inputs) or is_output(node.outputs[0]):
            continue
        value = node.inputs[0]
        if node.op_type == "Slice":
            name = node.outputs[0].name
            value = add_initializer(
                model.graph, name, evaluate(model, node.outputs[0], [node])
            )
        replace_value(node.outputs[0], value)


def drop_neutral(model: Model) -> None:
    """Remove nodes that return one of their operands.

    Before: A product or quotient has one stored number, which is one, or a sum or difference has a
    stored zero; a Cast is to the type that its operand has.
    After: Their readers read the operand. ONNX Runtime removes these nodes before it looks for
    integer kernels, so no rule may take them for float operators. It keeps tensors of several ones.
    """
    nodes = nodes_of(model, *_NEUTRAL)
    casts = nodes_of(model, "Cast")
    shapes = known_shapes(model) if nodes else {}
    types = known_types(model) if casts else {}
    for node in nodes:
        kept = _operand_beside(model, node, shapes)
        if kept is not None:
            replace_value(node.outputs[0], kept)
    for node in casts:
        dtype = types.get(str(node.inputs[0].name))
        if dtype is not None and int(dtype) == attribute(node, "to"):
            replace_value(node.outputs[0], node.inputs[0])
    remove_unused(model)


def _operand_beside(
    model: Model, node: Node, shapes: Mapping[str, Shape]
) -> Value | None:
    """Return the operand of a node that the other one, a stored number, leaves as it is."""
    first, second = node.inputs
    pairs = [(first, second)]
    if node.op_type in ("Add", "Mul"):
        pairs.append((second, first))
    for kept, number in pairs:
        shape = shapes.get(str(number.name))
        dims = shapes.get(str(kept.name))
        is_one_number = shape is not None and all(length == 1 for length in shape)
        if not is_one_number or dims is None or len(dims) < len(shape or ()):
            continue
        value = constant_value(model, number)
        if value is not None and bool((value == _NEUTRAL[node.op_type]).all()):
            return kept
    return None


def constant_value(model: Model, value: Value, depth: int = 16) -> Tensor | None:
    """Return ``value`` if it follows from stored tensors in at most ``depth`` nodes; else None.

    None too where the reference evaluator of ``onnx`` cannot compute it.
    """
    if is_constant(value):
        return value_of(value)
    nodes: list[Node] = []
    pending = [value]
    visited = {value}
    while pending:
        current = pending.pop()
        if is_constant(current) and not current.is_graph_input():
            continue
        node = current.producer()
        if node is None or len(nodes) == depth:
            return None
        nodes.append(node)
        new = [v for v in node.inputs if v is not None and v not in visited]
        visited.update(new)
        pending += new
    try:
        return evaluate(model, value, nodes)
    except Exception:
        # It fails on some valid nodes, as GatherElements with fewer indices than data, by errors
        # of numpy and of Python. The file then computes the value itself.
        return None


def evaluate(
    model: Model,
    value: Value,
    nodes: Iterable[Node],
    given: Mapping[Value, Tensor] | None = None,
) -> Tensor:
    """Compute ``value`` with the reference evaluator of ``onnx``.

    ``nodes`` are all between it and stored or ``given`` values, in any order.
    """
    given = given or {}
    nodes = list(dict.fromkeys(nodes))
    if len(nodes) > 1:
        chosen = set(nodes)
        nodes = [node for node in model.graph if node in chosen]
    constants = {
        v for node in nodes for v in node.inputs if is_constant(v) and v not in given
    }
    graph = _helper.make_graph(
        [*map(serde.serialize_node, nodes)],
        "constants",
        [_helper.make_empty_tensor_value_info(v.name) for v in given],
        [_helper.make_empty_tensor_value_info(value.name)],
        initializer=[*map(stored_proto, constants)],
    )
    imports = _opsets(model.graph.opset_imports)
    evaluator = _reference.ReferenceEvaluator(
        _helper.make_model(graph, opset_imports=imports)
    )
    (result,) = evaluator.run(
        None, {v.name: tensor.numpy() for v, tensor in given.items()}
    )
    # The result may be a number without dimensions, or an expanded view.
    return torch.from_numpy(result.reshape(-1).copy()).reshape(result.shape)


def known_shapes(model: Model, open_names: bool = False) -> dict[str, Shape]:
    """Return the shapes that follow from those of inputs and stored tensors, by name of the value.

    With ``open_names`` open lengths that are equal have one name, also where no input has it.
    Shapes that the exporter noted elsewhere are not used: the TorchScript exporter notes the batch
    size of the example there.
    """
    type_by_name = _inferred(model)
    # Inference makes up names for dimensions that it does not know.
    input_dims = [
        type_by_name[str(value.name)].shape.dim for value in model.graph.inputs
    ]
    names = {dim.dim_param for dims in input_dims for dim in dims}
    stored = model.graph.initializers.values()
    shapes: dict[str, Shape] = {
        value.name: tuple(value.shape.numpy()) for value in stored
    }
    for name, kind in type_by_name.items():
        if kind.HasField("shape"):
            lengths = (_length(dim) for dim in kind.shape.dim)
            shapes[name] = tuple(
                n if open_names or isinstance(n, int) or n in names else None
                for n in lengths
            )
    return shapes


def known_types(model: Model) -> dict[str, DataType]:
    """Return the types of the elements of all tensors of the graph, by name of the value."""
    types = {
        name: onnx_ir.DataType(kind.elem_type)
        for name, kind in _inferred(model).items()
    }
    return types | {name: data_type(v) for name, v in model.graph.initializers.items()}


def _inferred(model: Model) -> dict[str, Any]:
    """Return the inferred types by name; of large stored tensors only the shapes take part."""
    graph, describe = model.graph, _helper.make_tensor_value_info
    inputs = [*map(serde.serialize_value, graph.inputs)]
    input_names = {value.name for value in inputs}
    small: list[Any] = []
    for value in graph.initializers.values():
        if value.const_value.size <= _SMALL:
            small.append(stored_proto(value))
        elif value.name not in input_names:
            shape = list(value.const_value.shape.numpy())
            inputs.append(describe(value.name, data_type(value).value, shape))
    outputs = [
        describe(v.name, 0 if v.dtype is None else v.dtype.value, None)
        for v in graph.outputs
    ]
    slim = _helper.make_model(
        _helper.make_graph([*map(_to_infer, graph)], "shapes", inputs, outputs, small),
        functions=[*map(serde.serialize_function, model.functions.values())],
        opset_imports=_opsets({**graph.opset_imports, _UNKNOWN: 1}),
        ir_version=model.ir_version,
    )
    inferred = _onnx.shape_inference.infer_shapes(slim, data_prop=True).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    return {value.name: value.type.tensor_type for value in values}


def _opsets(versions: Mapping[str, int]) -> list[Any]:
    return [
        _helper.make_opsetid(domain, version) for domain, version in versions.items()
    ]


def _to_infer(node: Node) -> Any:
    """Return a node for shape inference; one that it gets wrong as an operator it does not know."""
    proto = serde.serialize_node(node)
    if node.op_type == "SplitToSequence" and not attribute(node, "keepdims", 1):
        proto.domain = _UNKNOWN  # onnx 1.23 says that the parts keep the dimension.
    return proto


def _length(dim: Any) -> int | str | None:
    return (
        int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param) or None
    )


def fold_shapes(model: Model) -> None:
    """Compute what follows from known lengths.

    Before: The target shape of a Reshape, and the scale of attention, are arithmetic on Shape
    nodes.
    After: Both are stored tensors where the lengths are known. A Reshape with one unknown length
    has -1 there (or 0, where the length is kept), so a dynamic batch stays dynamic.
    """
    _fold_once(model, {})  # Shape inference follows no arithmetic on indexes.
    while nodes_of(model, "Shape", "Reshape") and _fold_once(
        model, known_shapes(model)
    ):
        pass


def fold_lengths(model: Model) -> None:
    """Compute all that follows from the lengths of inputs, for a look at the shapes of a graph.

    Before: Any graph. After: What was computed from lengths alone is stored; a graph whose inputs
    have open lengths would be wrong for others than it has.
    """
    lift_constants(model)
    while _fold_once(model, known_shapes(model), _ARITHMETIC | _CHOICES):
        pass


def _fold_once(
    model: Model, shapes: dict[str, Shape], arithmetic: frozenset[str] = _ARITHMETIC
) -> bool:
    """Fold all that ``shapes`` allows; return True if there was anything."""
    folded_any = False
    for node in list(model.graph):
        if node.op_type == "Reshape" and not is_constant(node.inputs[1]):
            folded_any |= _reshape_to_known(node, shapes)
        if len(node.outputs) != 1 or is_output(node.outputs[0]):
            continue
        value = _from_shape(model, node, shapes)
        if value is None and _is_small_arithmetic(node, arithmetic):
            value = evaluate(model, node.outputs[0], [node])
        if value is not None:
            name = str(node.outputs[0].name)
            replace_value(node.outputs[0], add_initializer(model.graph, name, value))
            folded_any = True
    remove_unused(model)
    return folded_any


def _is_small_arithmetic(node: Node, arithmetic: frozenset[str]) -> bool:
    """Return True for arithmetic on small stored tensors whose result numpy can hold."""
    if node.op_type == "ConstantOfShape":
        lengths = node.inputs[0]
        return is_constant(lengths) and int(value_of(lengths).prod()) <= _SMALL
    if node.op_type not in arithmetic or node.domain:
        return False
    if (
        node.op_type == "Cast"
        and onnx_ir.DataType(attribute(node, "to")).name not in _NUMERIC
    ):
        return False
    return are_constant(node.inputs) and all(
        data_type(value).name in _NUMERIC and value.const_value.size <= _SMALL
        for value in node.inputs
        if value is not None
    )


def _from_shape(model: Model, node: Node, shapes: dict[str, Shape]) -> Tensor | None:
    """Return the value of a Shape, or of lengths picked from one, where these are known."""
    picks = node.op_type in ("Gather", "Slice") and are_constant(node.inputs[1:])
    source = computed_by(node.inputs[0], "Shape") if picks else node
    if source is None or source.op_type != "Shape" or source.attributes:
        return None
    shape = shapes.get(source.inputs[0].name)
    if shape is None:
        return None
    lengths = torch.tensor(
        [n if isinstance(n, int) else -1 for n in shape],
        dtype=torch.int64,
        device="cpu",
    )
    if picks:
        lengths = evaluate(model, node.outputs[0], [node], {node.inputs[0]: lengths})
    return None if bool((lengths < 0).any()) else lengths


def _reshape_to_known(node: Node, shapes: dict[str, Shape]) -> bool:
    """Store the target shape of a Reshape if at most one of its lengths is unknown."""
    before = shapes.get(node.inputs[0].name, ())
    after = shapes.get(node.outputs[0].name)
    if after is None or 0 in after:
        return False
    missing = _what_is_left(before, after)
    if missing is not None:
        after = tuple(missing if length is None else length for length in after)
    if sum(not isinstance(length, int) for length in after) > 1:
        return False
    may_keep = not attribute(node, "allowzero", 0)
    lengths = []
    for i, length in enumerate(after):
        # 0 keeps a length and its name, for those who infer shapes; -1 is what is left.
        if isinstance(length, int):
            lengths.append(length)
        elif may_keep and isinstance(length, str) and before[i : i + 1] == (length,):
            lengths.append(0)
        else:
            lengths.append(-1)
    name = f"{node.outputs[0].name}/shape"
    node.replace_input_with(1, add_numbers(node.graph, name, lengths))
    return True


def _what_is_left(before: Shape, after: Shape) -> int | None:
    """Return the one unknown length of a reshaped tensor whose open lengths stay the same."""
    if None in before or after.count(None) != 1 or _names(before) != _names(after):
        return None
    whole, part = (
        math.prod(length for length in shape if isinstance(length, int))
        for shape in (before, after)
    )
    return whole // part if part else None


def _names(shape: Shape) -> list[str]:
    return sorted(length for length in shape if isinstance(length, str))
