"""``from_onnx``: an ONNX file as a GraphModule of ordinary modules."""

import collections
import contextlib
import logging
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchq.errors import FrontendError, InputError
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import (
    CONVERTERS,
    GraphBuilder,
    NodeContext,
    qualified,
)
from torchq.frontends.onnx.qoperators import with_pairs_
from torchq.frontends.onnx.reader import (
    DEEPEST,
    attribute_values,
    graphs,
    is_four_bits,
    read_model,
    tensor_of,
)
from torchq.frontends.onnx.shapes import free_batch_, infer_types, infer_value_types
from torchq.frontends.onnx.written_out import merge_gelus_
from torchq.utils.optional import import_optional


def from_onnx(source: object, *, free_batch: bool = False) -> fx.GraphModule:
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
            ``meta["onnx_name"]`` and ``meta["onnx_op"]``, and the names of the tensors that it
            computes in ``meta["onnx_tensors"]``; layers have that of their weight in
            ``meta["onnx_weight"]``.

    Raises:
        FrontendError: the file is broken, or operators cannot be converted: the text names all of
            them at once, with counts. Or an operator cannot do without the fixed batch.
        MissingExtraError: the package onnx is not installed.

    Example:
        >>> model = torchq.frontends.from_onnx("model.onnx")  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    model, folder = read_model(source)
    where = (
        "from_onnx" if not isinstance(source, (str, Path)) else f"from_onnx: {source}"
    )
    return Importer(model, folder, where, free_batch).run()


class Importer:
    """Converts one model."""

    def __init__(
        self, model: Any, folder: Path | None, where: str, free_batch: bool
    ) -> None:
        self.model = prepare(model, where)
        self.folder = folder
        self.where = where
        self.versions = opset_versions(self.model)
        if free_batch:
            free_batch_(self.model, where)
        self.builder = GraphBuilder(where, self.convert_nodes)
        shapes, self.builder.dtypes = infer_types(self.model, where)
        for name, sizes in shapes.items():
            self.builder.shapes[name] = [
                n if isinstance(n, int) else None for n in sizes
            ]
        for graph in graphs(self.model.graph, where):
            self.builder.readers.update(
                name for node in graph.node for name in node.input
            )
            self.builder.readers.update(value.name for value in graph.output)

    def run(self) -> fx.GraphModule:
        """Convert the whole model."""
        graph, builder = self.model.graph, self.builder
        self._store(builder, graph)
        if graph.sparse_initializer:
            raise FrontendError(f"{self.where}: sparse initializers are not supported")
        inputs = [value for value in graph.input if value.name not in builder.values]
        for value in inputs:
            self._add_input(value)
        self.convert_nodes(builder, graph)
        node = NodeContext(builder, "output", "output", 1, {}, [], [], [])
        outputs = []
        for value_info in graph.output:
            self._expect_tensor(value_info, "output")
            if builder.values[value_info.name] is None:
                raise FrontendError(
                    f"{self.where}: its node leaves out the output {value_info.name!r}"
                )
            outputs.append(node.tensor(builder.values[value_info.name]))
        names, output_names = (
            [value_info.name for value_info in infos]
            for infos in (inputs, graph.output)
        )
        shapes = [builder.shapes.get(name) for name in names]
        outputs = merge_gelus_(builder, outputs)
        return builder.finish(
            outputs, graph.name or "OnnxModel", names, output_names, shapes
        )

    def _expect_tensor(self, info: Any, what: str) -> None:
        if not info.type.HasField("tensor_type"):
            kind = info.type.WhichOneof("value")
            raise FrontendError(
                f"{self.where}: the {what} {info.name!r} is a {kind}; expected a tensor"
            )

    def _add_input(self, info: Any) -> None:
        """Make an argument of ``forward``, whose sizes are checked where the file fixes some."""
        name, builder = info.name, self.builder
        self._expect_tensor(info, "input")
        if builder.dtypes.get(name) is None:
            raise FrontendError(
                f"{self.where}: torch has no type for elements of input {name!r}"
            )
        node = builder.input(name)
        node.meta |= {"onnx_name": name, "onnx_tensors": (name,)}
        sizes = builder.shapes.get(name)
        if sizes is not None and any(sizes):
            checked = builder.graph.call_function(with_sizes, (node, name, sizes))
            checked.meta |= node.meta
            node = checked
        builder.values[name] = node

    def _store(self, builder: GraphBuilder, graph: Any) -> None:
        """Make constants of the initializers of a graph."""
        for tensor in graph.initializer:
            value = Constant(tensor_of(tensor, self.folder, self.where), tensor.name)
            builder.values[tensor.name] = value
            if is_four_bits(tensor):
                builder.four_bits.add(value)

    def convert_nodes(self, builder: GraphBuilder, graph: Any) -> list[Value]:
        """Convert a graph, or a sub-graph that sees the values so far; return the outputs."""
        if graph is not self.model.graph:
            self._store(builder, graph)
        for number, node in enumerate(graph.node):
            self._convert(builder, node, number)
        missing = [
            value.name for value in graph.output if value.name not in builder.values
        ]
        if missing:
            raise FrontendError(
                f"{self.where}: nothing computes the output {missing[0]!r}"
            )
        return [builder.values[value.name] for value in graph.output]

    def _convert(self, builder: GraphBuilder, proto: Any, number: int) -> None:
        name = proto.name or f"{proto.op_type}_{number}"
        domain = domain_of(proto)
        missing = [
            source for source in proto.input if source and source not in builder.values
        ]
        if missing:
            raise FrontendError(
                f"{self.where}: {proto.op_type} {name!r} reads {missing[0]!r}, "
                "which nothing before it computes"
            )
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
        entry = CONVERTERS[qualified(domain, proto.op_type)]
        if entry.about is not None:
            _check_dtypes(context, entry.about)
        results = context.converted(entry.convert)
        for output, value in zip(proto.output, results, strict=False):
            if output:
                builder.values[output] = value
                if isinstance(value, fx.Node):
                    origins = value.meta.get("onnx_tensors", ())
                    value.meta["onnx_tensors"] = (*origins, output)
        for output in proto.output[len(results) :]:
            if output:
                context.refuse(f"its output {output!r} is not supported")


def _check_dtypes(node: NodeContext, accepted: frozenset[torch.dtype]) -> None:
    """Refuse element types that torch cannot compute with."""
    for name in (*node.input_names, *node.output_names):
        value = node.builder.values.get(name)
        dtype = node.builder.dtypes.get(name)
        if isinstance(value, Constant):
            dtype = value.tensor.dtype
        if name in node.builder.dtypes and dtype is None:
            node.refuse(f"torch has no type for the elements of {name!r}")
        if dtype is not None and dtype not in accepted:
            node.refuse(
                f"{name!r} holds {dtype}, which is not supported for this operator"
            )


log = logging.getLogger(__name__)

#: The opset versions of ONNX's own operators whose meaning the converters know.
OLDEST, NEWEST = 11, 28


def _operators(model: Any, where: str) -> collections.Counter[tuple[str, str]]:
    """Count the operators of a model, by domain and name."""
    nodes = (node for graph in graphs(model.graph, where) for node in graph.node)
    return collections.Counter((domain_of(node), node.op_type) for node in nodes)


def prepare(model: object, where: str) -> Any:
    """Return a model of nothing but operators that can be converted."""
    with_pairs_(model, where)
    counts = _operators(model, where)
    version = opset_versions(model).get("", OLDEST)
    if version > NEWEST:
        raise FrontendError(
            f"{where}: got opset {version}; expected at most {NEWEST}. Export for an older opset"
        )
    if version < OLDEST:
        model = _upgraded(model, where, version)
        counts = _operators(model, where)
    for _ in range(DEEPEST):
        model, before = _without_functions(model, where, counts), counts
        counts = _operators(model, where)
        if counts == before:
            break
    named = sorted((qualified(*key), count) for key, count in counts.items())
    unknown = {name: count for name, count in named if name not in CONVERTERS}
    if unknown:
        text = ", ".join(f"{name} ({count})" for name, count in unknown.items())
        raise FrontendError(f"{where}: no converter for {text}. {_advice(unknown)}")
    return model


def _upgraded(model: Any, where: str, version: int) -> object:
    """Return a model of an old opset in the oldest one that converters know."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    prelus = (node for node in model.graph.node if node.op_type == "PRelu")
    if version < 7 and any(
        sizes.get(name) != 1 for node in prelus for name in node.input[1:]
    ):
        raise FrontendError(
            f"{where}: got opset {version}, where a PRelu has a slope of each channel; "
            f"expected opset 7 or newer"
        )
    if version < 9 and any(node.op_type == "Scan" for node in model.graph.node):
        raise FrontendError(
            f"{where}: got opset {version}, where a Scan has a batch of its own; "
            f"expected opset 9 or newer"
        )
    try:
        converter = import_optional("onnx.version_converter", "from_onnx")
        return converter.convert_version(model, OLDEST)
    except Exception as error:  # the binding raises several kinds
        raise FrontendError(
            f"{where}: got opset {version}, which onnx.version_converter cannot bring to {OLDEST} "
            f"({type(error).__name__}: {error}). Export for opset {OLDEST} or newer"
        ) from error


def opset_versions(model: Any) -> dict[str, int]:
    """Return the version of each domain; that of ONNX's own operators is ``""``."""
    return {domain_of(entry): entry.version for entry in model.opset_import}


def domain_of(message: Any) -> str:
    """Return the domain of a node or of an opset, ``""`` for ONNX's own."""
    return "" if message.domain == "ai.onnx" else str(message.domain)


def _without_functions(
    model: Any, where: str, operators: Iterable[tuple[str, str]]
) -> object:
    """Replace operators without a converter by the functions that the standard defines them by."""
    defs = import_optional("onnx", "from_onnx").defs
    versions = opset_versions(model)
    schemas: dict[tuple[str, str], Any] = {}
    for domain, op_type in operators:
        version = versions.get(domain, 1)
        if qualified(domain, op_type) not in CONVERTERS and defs.has(
            op_type, version, domain
        ):
            schema = defs.get_schema(op_type, version, domain)
            if schema.has_function or schema.has_context_dependent_function:
                schemas[domain, op_type] = schema
    for node in model.graph.node if schemas else ():
        schema = schemas.get((domain_of(node), node.op_type))
        attribute_names = {attribute.name for attribute in node.attribute}
        for name, attribute in schema.attributes.items() if schema else ():
            if (
                name not in attribute_names and attribute.default_value.type
            ):  # the inliner reads no defaults
                node.attribute.append(attribute.default_value)
    inliner = import_optional("onnx.inliner", "from_onnx")
    try:
        model = _with_bodies(model, where, schemas)
        names = sorted(schemas)
        return inliner.inline_selected_functions(
            model, names, inline_schema_functions=True
        )
    except Exception as error:  # the binding raises several kinds
        log.debug("%s: %s: %s", where, type(error).__name__, error)
        return model


def _with_bodies(model: Any, where: str, schemas: dict[tuple[str, str], Any]) -> object:
    """Put the bodies of functions in the place of operators that leave out an input in between.

    The inliner asks for the type of each input of a function that depends on them, and finds none
    there.
    """
    nodes = [
        node
        for graph in graphs(model.graph, where)
        for node in graph.node
        if "" in node.input
        and (domain_of(node), node.op_type) in schemas
        and schemas[domain_of(node), node.op_type].has_context_dependent_function
    ]
    if not nodes:
        return model
    onnx = import_optional("onnx", "from_onnx")
    types = infer_value_types(model)
    versions = opset_versions(model)
    bodies = []
    for number, node in enumerate(nodes):
        schema = schemas[domain_of(node), node.op_type]
        of_inputs = [types.get(name, b"") for name in node.input]
        body = schema.get_context_dependent_function_with_opset_version(
            versions.get(domain_of(node), 1), node.SerializeToString(), of_inputs
        )
        function = onnx.FunctionProto.FromString(body)
        function.name = f"{node.op_type}_{number}"
        function.domain = _BODIES
        if not function.opset_import:
            function.opset_import.extend(model.opset_import)
        bodies.append(function)
    for node, function in zip(nodes, bodies, strict=True):
        node.op_type, node.domain = function.name, function.domain
    model.functions.extend(bodies)
    model.opset_import.append(onnx.helper.make_opsetid(_BODIES, 1))
    inliner = import_optional("onnx.inliner", "from_onnx")
    return inliner.inline_local_functions(model)


#: The domain of functions while they are put in the place of operators.
_BODIES = "torchq.bodies"


def _advice(unknown: Iterable[str]) -> str:
    """Return how to do without operators that have no converter."""
    kinds = [name.rpartition(".")[2] for name in unknown]
    if any(
        kind.startswith(("ConvInteger", "MatMulInteger", "Dynamic")) for kind in kinds
    ):
        return (
            "It chooses scales at run time, as files of quantize_dynamic do: read the float file "
            "that it was made from"
        )
    if any(kind.startswith(("QLinear", "QAttention", "QEmbed")) for kind in kinds):
        return "Quantize the float file again with quant_format=QuantFormat.QDQ"
    if any(name.startswith("com.microsoft.") for name in unknown):
        return "Read the file from before its runtime optimized it"
    return (
        "Write one with torchq.frontends.onnx.converter, or cut the graph before them"
    )


@one_call
def with_sizes(x: Tensor, name: str, sizes: Sequence[int | None]) -> Tensor:
    """Return ``x`` if it has the sizes that the file states, None for open ones; else raise."""
    tracing = torch.jit.is_tracing()
    with warnings.catch_warnings() if tracing else contextlib.nullcontext():
        if tracing:  # sizes are no numbers there
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
        pairs = zip(sizes, x.shape, strict=False)
        wrong = any(size is not None and bool(size != actual) for size, actual in pairs)
    if wrong or x.dim() != len(sizes):
        expected_sizes = ", ".join(
            "any" if size is None else str(size) for size in sizes
        )
        raise InputError(
            f"{name}: got the shape {tuple(x.shape)}; expected ({expected_sizes}), which "
            "the ONNX file fixes. from_onnx(path, free_batch=True) frees the first size"
        )
    return x
