"""ONNX graphs as ``onnx_ir`` models: loading, saving, and the edits that every pass needs.

``onnx_ir`` is the graph library of torch's own exporter. It is optional, so this module imports it
on first use; the names ``Model``, ``Node``, ... stand for its classes in annotations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchq.errors import ExportError, TorchqError
from torchq.utils import replacing, why_no_model
from torchq.utils.optional import OptionalModule, import_optional

Model: TypeAlias = Any
Graph: TypeAlias = Any
Node: TypeAlias = Any
Value: TypeAlias = Any
DataType: TypeAlias = Any
#: A rewriting of a model in place. Its docstring states the graph before and after.
Pass: TypeAlias = Callable[[Model], None]


@dataclass(frozen=True)
class Rewrite:
    """A pass that changes what layers hold, so that a file is compared after it is undone.

    Attributes:
        do: The pass.
        undo: Gives a graph back what ``do`` changed, or notes in the ``meta`` of nodes what a model
            cannot have; returns what is wrong by the name of a quantizer. It leaves other files as
            they are: what it needs is in the record.
    """

    do: Pass
    undo: Callable[[Model], dict[str, str]]

    def __call__(self, model: Model) -> None:
        """Run the pass."""
        self.do(model)


onnx_ir: Any = OptionalModule("onnx_ir", "torchq.onnx")
_passes: Any = OptionalModule("onnx_ir.passes.common", "torchq.onnx")
#: Its functions for one class each; ``onnx_ir.to_proto`` asks for every protocol, which is slow.
serde: Any = OptionalModule("onnx_ir.serde", "torchq.onnx")
_adapters: Any = OptionalModule("onnx_ir.tensor_adapters", "torchq.onnx")

_EXTERNAL_ABOVE = 1_800_000_000  # Bytes; a protobuf message ends at 2 GiB.
_NAMES = "torchq.names"  # Key of the set of all names in a graph's ``meta``.
_IR_VERSIONS = {21: 10, 22: 10, 23: 11}


def load_model(path: str | os.PathLike[str], *, check: bool = True) -> Model:
    """Read a model file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    onnx = import_optional("onnx", "torchq.onnx")
    with named_errors(path):
        if check:
            onnx.checker.check_model(str(path))
        model = onnx_ir.load(path)
        if stored_size(model) < _EXTERNAL_ABOVE:
            model = onnx_ir.external_data.load_to_model(model)
    return model


@contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any error inside the ``with`` block into one that says which file is broken.

    Parsers, shape inference and evaluators raise errors of many unrelated classes on a broken
    file. torchq's own errors pass.
    """
    try:
        yield
    except TorchqError:
        raise
    except Exception as error:
        with open(path, "rb") as file:
            reason = why_no_model(file.read(64))
        if reason:
            raise ExportError(f"{path}: {reason}") from error
        raise ExportError(
            f"{path}: is not a valid ONNX file ({first_line(error)}). Export the model again"
        ) from error


def save_model(
    model: Model, path: str | os.PathLike[str], *, check: bool = True
) -> int:
    """Write a model; the files at ``path`` are replaced whole or not at all.

    Tensors go to ``path + ".data"`` where they exceed what one file can hold.
    """
    checker = import_optional("onnx.checker", "torchq.onnx")
    path = Path(os.path.realpath(path))
    data = path.with_name(f"{path.name}.data")
    with replacing(data, path) as (new_data, new_path):
        if stored_size(model) < _EXTERNAL_ABOVE:
            proto = onnx_ir.to_proto(model)
            if check:
                _check(checker, proto, path)
            new_path.write_bytes(proto.SerializeToString())
        else:
            onnx_ir.save(model, new_path, external_data=new_data.name)
            if check:
                _check(checker, str(new_path), path)
        return sum(
            file.stat().st_size for file in (new_data, new_path) if file.exists()
        )


def _check(checker: Any, model: Any, path: Path) -> None:
    """Run the checker on a message or a file, with an error that says what to do."""
    try:
        checker.check_model(model)
    except checker.ValidationError as error:
        raise ExportError(
            f"{path}: the graph is broken ({first_line(error)}); expected a valid one. If "
            "torch.onnx.export writes such a file of the float model too, the fault is in torch's "
            "exporter: pass dynamo=True or dynamo=False for the other one"
        ) from error


def run_passes(model: Model, passes: Iterable[Pass]) -> None:
    """Run passes in order; after each one, remove what no node and no output reads any more."""
    for run in passes:
        run(model)
        remove_unused(model)


def infer_shapes(model: Model) -> None:
    """Give the values of a graph the shapes that ONNX can tell; other values stay without."""
    _passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(
        model
    )


def names(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by spaces."""
    return frozenset(text.split())


def opset_of(model: Model) -> int:
    """Return the version of the default operator set; 0 where the model names none."""
    imports = model.graph.opset_imports
    return int(imports.get("", imports.get("ai.onnx", 0)))


def set_opset(model: Model, opset: int) -> None:
    """Say which version of the default operator set a model has, whose operators are the same."""
    model.graph.opset_imports[""] = opset
    model.ir_version = max(model.ir_version, _IR_VERSIONS.get(opset, 0))


def float_size(model: Model) -> int:
    """Return the number of bytes that the initializers would occupy in float32."""
    return 4 * sum(v.const_value.size for v in model.graph.initializers.values())


def nodes_of(model: Model, *op_types: str) -> list[Node]:
    """Return the nodes of the main graph with these operator types, in order."""
    return [node for node in model.graph if node.op_type in op_types]


def computed_by(value: Value | None, *op_types: str) -> Node | None:
    """Return the node that computes ``value`` if its operator type is one of ``op_types``."""
    node = None if value is None else value.producer()
    return (
        node
        if node is not None and (not op_types or node.op_type in op_types)
        else None
    )


def readers(value: Value) -> list[Node]:
    """Return the nodes that read ``value``, once per input, also from inside loops and branches."""
    return [use.node for use in value.uses()]


def is_output(value: Value) -> bool:
    """Return True if the model returns ``value``."""
    return bool(value.is_graph_output())


def is_constant(value: Value | None) -> bool:
    """Return True if ``value`` is stored in the file."""
    return (
        value is not None and value.is_initializer() and value.const_value is not None
    )


def are_constant(values: Iterable[Value | None]) -> bool:
    """Return True if all values that are not left out are stored in the file."""
    return all(value is None or is_constant(value) for value in values)


def data_type(value: Value) -> DataType:
    """Return the ``onnx_ir.DataType`` of a stored value."""
    return value.const_value.dtype


def value_of(value: Value) -> Tensor:
    """Return a stored value as a new tensor; 4-bit codes come as int8 and uint8."""
    array = value.const_value.numpy()
    dtype = data_type(value)
    if dtype.bitwidth == 4:
        return torch.from_numpy(array.astype("int8" if dtype.is_signed() else "uint8"))
    bits = {"bfloat16": "int16"}.get(array.dtype.name)
    if array.dtype.name.startswith("float8"):
        bits = "uint8"
    if bits is None:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.copy().view(bits)).view(
        _adapters.to_torch_dtype(dtype)
    )


def stored_proto(value: Value) -> Any:
    """Return a stored value as a TensorProto under its name."""
    proto = serde.serialize_tensor(value.const_value)
    proto.name = value.name
    return proto


def attribute(node: Node, name: str, default: object = None) -> Any:
    """Return the value of an attribute of ``node``, or ``default`` where it has none."""
    stored = node.attributes.get(name)
    return default if stored is None else stored.value


def set_attribute(node: Node, name: str, value: object) -> None:
    """Give a node an attribute: an integer, or a list of integers."""
    node.attributes[name] = onnx_ir.convenience.convert_attribute(name, value)


def input_at(node: Node, index: int) -> Value | None:
    """Return an input of a node; None for one that is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def fresh_name(graph: Graph, base: str) -> str:
    """Return ``base``, or ``base#2``, ``base#3``, ... where a value has that name already."""
    names = graph.meta.get(_NAMES)
    if names is None:
        names = {value.name for value in graph.inputs} | set(graph.initializers)
        for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
            names |= {node.name, *(value.name for value in node.outputs)}
        graph.meta[_NAMES] = names
    name = base
    count = 1
    while name in names or name in graph.initializers:
        count += 1
        name = f"{base}#{count}"
    names.add(name)
    return name


def add_initializer(
    graph: Graph, name: str, tensor: Tensor, dtype: DataType | None = None
) -> Value:
    """Store a tensor in the graph; codes of INT4 and UINT4, a ``dtype``, come as int8 and uint8."""
    name = fresh_name(graph, name)
    tensor = tensor.detach().cpu().contiguous()
    if dtype is None or dtype.bitwidth != 4:
        stored = _adapters.TorchTensor(tensor, name=name)
    else:
        stored = onnx_ir.Tensor(tensor.numpy(), dtype=dtype, name=name)
    value = onnx_ir.Value(
        name=name,
        type=onnx_ir.TensorType(stored.dtype),
        shape=onnx_ir.Shape(tensor.shape),
        const_value=stored,
    )
    graph.register_initializer(value)
    return value


def add_numbers(graph: Graph, name: str, numbers: Iterable[int]) -> Value:
    """Store integers, such as a shape or axes, as int64."""
    return add_initializer(
        graph, name, torch.tensor([*numbers], dtype=torch.int64, device="cpu")
    )


def replace_stored(
    value: Value, tensor: Tensor, dtype: DataType | None = None
) -> Value:
    """Store other contents under the name of a stored value, for all its readers."""
    graph = value.graph
    name = str(value.name)
    new = add_initializer(graph, name, tensor, dtype)
    value.replace_all_uses_with(new)
    graph.initializers.pop(name)
    new.name = name
    return new


def add_node(
    after: Node,
    op_type: str,
    inputs: list[Value | None],
    name: str,
    attributes: Mapping[str, object] | None = None,
) -> Value:
    """Insert a node with one output behind another node."""
    name = fresh_name(after.graph, name)
    output = onnx_ir.Value(name=name)
    after.append(onnx_ir.node(op_type, inputs, attributes, outputs=[output], name=name))
    return output


def replace_value(old: Value, new: Value) -> None:
    """Let every reader of ``old`` read ``new``; a model output keeps its name."""
    if is_output(old):
        new = _output_named_as(old, new)
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def _output_named_as(old: Value, new: Value) -> Value:
    """Give ``new`` the name of the model output ``old``; copy it where it has to keep its own."""
    name = old.name
    node = new.producer()
    if node is None or is_output(new):
        copy = onnx_ir.Value(name=name)
        old.producer().prepend(
            onnx_ir.node("Identity", [new], outputs=[copy], name=name)
        )
        new = copy
    old.name = fresh_name(old.producer().graph, f"{name}/replaced")
    new.name = name
    new.type = new.type or old.type
    new.shape = new.shape or old.shape
    return new


def bypass(node: Node) -> None:
    """Remove a node with one input that counts; the readers of its output read that input."""
    replace_value(node.outputs[0], node.inputs[0])
    node.graph.remove(node, safe=True)


def remove_unused(model: Model) -> None:
    """Remove nodes and initializers that neither a node nor an output of the model reads."""
    _passes.RemoveUnusedNodesPass()(model)


def stored_size(model: Model) -> int:
    """Return the number of bytes of the initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values())


def first_line(error: Exception) -> str:
    """Return the class and the first line of the text of an error."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"
