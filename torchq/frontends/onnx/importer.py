"""``from_onnx``: an ONNX file as a GraphModule of ordinary modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx

from torchq.errors import FrontendError
from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.batch import free_batch_
from torchq.frontends.onnx.builder import GraphBuilder
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions.inputs import with_sizes
from torchq.frontends.onnx.inference import infer_types, note_types
from torchq.frontends.onnx.preparation import (
    count_readers,
    domain_of,
    opset_versions,
    prepare,
)
from torchq.frontends.onnx.reader import (
    attribute_values,
    is_four_bits,
    read_model,
    tensor_of,
)
from torchq.frontends.onnx.registry import CONVERTERS, Entry


def from_onnx(source: Any, *, free_batch: bool = False) -> fx.GraphModule:
    """Read an ONNX file as a model of ordinary torch modules.

    Convolutions, linear layers, norms, pooling, recurrent layers and activations become modules of
    :mod:`torch.nn`, named after the weights or nodes of the file; the rest becomes calls of torch
    functions. What the file computes from constants is computed once. Sizes that the file leaves
    open stay open; an input with another size than one that the file fixes is an error, as it is in
    ONNX Runtime.

    Args:
        source: a path, the bytes of a file, or an ``onnx.ModelProto``. External data is read from
            the folder of the path.
        free_batch: take any batch where the file fixes it: the first size of the first input, and
            of all inputs with the same one, becomes open. A Reshape that repeats the batch copies
            it from its input.

    Returns:
        a module in eval mode whose ``forward`` takes the inputs of the file in order, or by name,
            and returns its output, or a tuple of its outputs in order. ``input_names`` and
            ``output_names`` give the names in the file, ``input_shapes`` what it says of shapes;
            each graph node has the name and the operator of the file's node in
            ``meta["onnx_name"]`` and ``meta["onnx_op"]``.

    Raises:
        FrontendError: the file is broken, or operators cannot be converted: the text names all of
            them at once, with counts. Or an operator cannot do without the fixed batch.
        MissingExtraError: the package onnx is not installed.

    Example:
        >>> model = torchq.frontends.from_onnx("model.onnx")  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    model, folder = read_model(source)
    where = "from_onnx" if not isinstance(source, (str, Path)) else f"from_onnx: {source}"
    return Importer(model, folder, where, free_batch).run()


class Importer:
    """Converts one model.

    Args:
        model: an ``onnx.ModelProto``.
        folder: of external data.
        where: how errors begin.
        free_batch: open the first size of the inputs.

    Attributes:
        graph: what has been converted so far.
        shapes, dtypes: of the tensors of the file, as far as shape inference knows.
    """

    def __init__(
        self, model: Any, folder: Path | None, where: str, free_batch: bool = False
    ) -> None:
        self.model, self.folder, self.where = model, folder, where
        self.free_batch = free_batch
        self.versions: dict[str, int] = {}
        self.builder = GraphBuilder(where, self.convert_nodes)

    def run(self) -> fx.GraphModule:
        """Convert the whole model."""
        self.model = prepare(self.model, self.where)
        self.versions = opset_versions(self.model)
        if self.free_batch:
            free_batch_(self.model, self.where)
        self.builder.shapes, self.builder.dtypes = infer_types(self.model, self.where)
        self.builder.readers = count_readers(self.model.graph)
        self._begin()
        self.builder.convert_nodes(self.model.graph)
        return self._end()

    # Converting.

    def _begin(self) -> None:
        graph = self.model.graph
        self._store(self.builder, graph)
        if graph.sparse_initializer:
            raise FrontendError(f"{self.where}: sparse initializers are not supported")
        self.input_names = [
            value.name for value in graph.input if value.name not in self.builder.values
        ]
        for value in graph.input:
            if value.name in self.builder.values:
                continue
            if not value.type.HasField("tensor_type"):
                kind = value.type.WhichOneof("value")
                raise FrontendError(
                    f"{self.where}: the input {value.name!r} is a {kind}; expected a tensor"
                )
            if self.builder.dtypes.get(value.name) is None:
                raise FrontendError(
                    f"{self.where}: torch has no type for the elements of the input {value.name!r}"
                )
            node = self.builder.input(value.name)
            node.meta["onnx_name"] = value.name
            self.builder.values[value.name] = self._checked(node, value.name)

    def _checked(self, node: fx.Node, name: str) -> fx.Node:
        """Return a node that gives an input, if it has the sizes that the file fixes."""
        sizes = self.builder.shapes.get(name)
        if sizes is None or not any(sizes):
            return node
        checked = self.builder.graph.call_function(with_sizes, (node, name, sizes))
        checked.meta |= {**node.meta, "is_wrapped": True}
        return checked

    def _store(self, builder: GraphBuilder, graph: Any) -> None:
        """Make constants of the initializers of a graph."""
        for tensor in graph.initializer:
            value = Constant(tensor_of(tensor, self.folder, self.where), tensor.name)
            builder.values[tensor.name] = value
            if is_four_bits(tensor):
                builder.four_bits.add(value)

    def convert_nodes(self, builder: GraphBuilder, graph: Any) -> list[Value]:
        """Convert the nodes of a graph, or of a sub-graph that sees the values so far.

        Return its outputs.
        """
        if graph is not self.model.graph:
            self._store(builder, graph)
        for number, node in enumerate(graph.node):
            self._convert(builder, node, number)
        missing = [value.name for value in graph.output if value.name not in builder.values]
        if missing:
            raise FrontendError(f"{self.where}: nothing computes the output {missing[0]!r}")
        return [builder.values[value.name] for value in graph.output]

    def _convert(self, builder: GraphBuilder, proto: Any, number: int) -> None:
        name = proto.name or f"{proto.op_type}_{number}"
        missing = [source for source in proto.input if source and source not in builder.values]
        if missing:
            raise FrontendError(
                f"{self.where}: {proto.op_type} {name!r} reads {missing[0]!r}, "
                "which nothing before it computes"
            )
        domain = domain_of(proto)
        context = NodeContext(
            builder,
            proto.op_type,
            name,
            self.versions.get(domain, 1),
            attribute_values(proto, self.folder, self.where),
            [builder.values[source] if source else None for source in proto.input],
            list(proto.input),
            list(proto.output),
        )
        entry = CONVERTERS[domain, proto.op_type]
        self._check_dtypes(context, entry)
        try:
            result: Any = entry.convert(context)
        except FrontendError:
            raise
        except Exception as error:  # a file may hold any attribute and any constant
            raise FrontendError(
                f"{self.where}: {proto.op_type} {name!r} cannot be converted "
                f"({type(error).__name__}: {error})"
            ) from error
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for output, value in zip(proto.output, results, strict=False):
            if output:
                builder.values[output] = value
        note_types(context, results)
        for output in proto.output[len(results) :]:
            if output:
                context.refuse(f"its output {output!r} is not supported")

    def _check_dtypes(self, node: NodeContext, entry: Entry) -> None:
        """Refuse element types that torch cannot compute with."""
        names = [name for name in (*node.input_names, *node.output_names) if name]
        if entry.dtypes is None:
            return
        for name in names:
            value = node.builder.values.get(name)
            dtype = node.builder.dtypes.get(name)
            if isinstance(value, Constant):
                dtype = value.tensor.dtype
            if name in node.builder.dtypes and dtype is None:
                node.refuse(f"torch has no type for the elements of {name!r}")
            if dtype is not None and dtype not in entry.dtypes:
                node.refuse(f"{name!r} holds {dtype}, which is not supported for this operator")

    def _end(self) -> fx.GraphModule:
        outputs = []
        node = NodeContext(self.builder, "output", "output", 1, {}, [], [], [])
        for info in self.model.graph.output:
            if not info.type.HasField("tensor_type"):
                kind = info.type.WhichOneof("value")
                raise FrontendError(
                    f"{self.where}: the output {info.name!r} is a {kind}; expected a tensor"
                )
            value = self.builder.values[info.name]
            if value is None:
                raise FrontendError(
                    f"{self.where}: the output {info.name!r} is left out by its node"
                )
            outputs.append(node.tensor(value))
        names = [info.name for info in self.model.graph.output]
        title = self.model.graph.name or "OnnxModel"
        shapes = [self.builder.shapes.get(name) for name in self.input_names]
        return self.builder.finish(outputs, title, self.input_names, names, shapes)
