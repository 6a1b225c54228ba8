"""``from_onnx``: an ONNX file as a GraphModule of ordinary modules."""

from __future__ import annotations

import collections
import keyword
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from torchq.errors import FrontendError
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.reader import attribute_values, dtype_of, read_model, tensor_of
from torchq.frontends.onnx.registry import CONVERTERS, Entry
from torchq.frontends.onnx.values import Constant, Value
from torchq.nn import TensorQuantizer
from torchq.utils.optional import need

if TYPE_CHECKING:
    from torchq.frontends.onnx.converters.quantization import Quantization

__all__ = ["Importer", "from_onnx"]

log = logging.getLogger(__name__)

#: The opset versions of ONNX's own operators whose meaning the converters know.
OLDEST, NEWEST = 6, 28
#: Initializers up to this size take part in shape inference.
_SMALL = 1024
_DEEPEST = 32


def from_onnx(source: Any) -> fx.GraphModule:
    """Read an ONNX file as a model of ordinary torch modules.

    Convolutions, linear layers, norms, pooling, recurrent layers and activations become modules of :mod:`torch.nn`, named
    after the weights or nodes of the file; the rest becomes calls of torch functions. What the file computes from constants
    is computed once. Sizes that the file leaves open stay open.

    Args:
        source: a path, the bytes of a file, or an ``onnx.ModelProto``. External data is read from the folder of the path.

    Returns:
        a module in eval mode whose ``forward`` takes the inputs of the file in order, or by name, and returns its output, or
        a tuple of its outputs in order. ``input_names`` and ``output_names`` give the names in the file; each graph node
        has the name and the operator of the file's node in ``meta["onnx_name"]`` and ``meta["onnx_op"]``.

    Raises:
        FrontendError: the file is broken, or operators cannot be converted: the text names all of them at once, with counts.
        MissingExtraError: the package onnx is not installed.

    Example:
        >>> model = torchq.frontends.from_onnx("model.onnx")  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    model, folder = read_model(source)
    where = "from_onnx" if not isinstance(source, (str, Path)) else f"from_onnx: {source}"
    return Importer(model, folder, where).run()


class Importer:
    """Converts one model.

    Args:
        model: an ``onnx.ModelProto``.
        folder: of external data.
        where: how errors begin.

    Attributes:
        graph: what has been converted so far.
        shapes, dtypes: of the tensors of the file, as far as shape inference knows.
    """

    def __init__(self, model: Any, folder: Path | None, where: str) -> None:
        self.model, self.folder, self.where = model, folder, where
        self.versions = {entry.domain: entry.version for entry in model.opset_import}
        if self.versions.get("ai.onnx"):
            self.versions.setdefault("", self.versions["ai.onnx"])
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[str, Value] = {}
        self.shapes: dict[str, list[int | None]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self.readers: collections.Counter[str] = collections.Counter()
        # Codes of the file: of each tensor its source and its quantization; the values again; quantizers; weights.
        self.codes: dict[fx.Node, tuple[Value, Quantization]] = {}
        self.dequantized: dict[fx.Node, Value] = {}
        self.quantizers: dict[fx.Node, tuple[Value, TensorQuantizer]] = {}
        self.weights: dict[Constant, Quantization] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []

    def run(self) -> fx.GraphModule:
        """Convert the whole model."""
        self._check_version()
        self._expand_functions()
        self._check_operators()
        self._infer()
        self.readers = _readers(self.model.graph)
        self._begin()
        self.convert_nodes(self.model.graph)
        return self._end()

    # Checks before anything is converted.

    def _check_version(self) -> None:
        version = self.versions.get("", OLDEST)
        if not OLDEST <= version <= NEWEST:
            raise FrontendError(
                f"{self.where}: got opset {version}; expected {OLDEST} to {NEWEST}. "
                "onnx.version_converter may bring the file there"
            )

    def _expand_functions(self) -> None:
        """Replace operators without a converter by the functions that the standard defines them as."""
        onnx, inliner = need("onnx", "from_onnx"), need("onnx.inliner", "from_onnx")
        for _ in range(_DEEPEST):
            found = set()
            for domain, op_type in _operators(self.model.graph):
                if (domain, op_type) in CONVERTERS or domain not in ("", "ai.onnx.ml"):
                    continue
                try:
                    schema = onnx.defs.get_schema(op_type, self.versions.get(domain, 1), domain)
                except Exception:  # the binding raises several kinds; an unknown operator is reported later
                    continue
                if schema.has_function or schema.has_context_dependent_function:
                    found.add((domain, op_type))
            if not found:
                return
            before = sum(_operators(self.model.graph).values())
            try:
                self.model = inliner.inline_selected_functions(
                    self.model, sorted(found), inline_schema_functions=True
                )
            except Exception as error:  # the binding raises several kinds
                log.debug("%s: %s: %s", self.where, type(error).__name__, error)
                return
            if sum(_operators(self.model.graph).values()) == before:
                return
            self.versions = {entry.domain: entry.version for entry in self.model.opset_import}

    def _check_operators(self) -> None:
        unknown = {
            key: count
            for key, count in _operators(self.model.graph).items()
            if key not in CONVERTERS
        }
        if unknown:
            text = ", ".join(
                f"{domain + '.' if domain else ''}{op_type} ({count})"
                for (domain, op_type), count in sorted(unknown.items())
            )
            raise FrontendError(
                f"{self.where}: no converter for {text}. "
                "Write one with torchq.frontends.onnx.converter, or cut the graph before them"
            )

    def _infer(self) -> None:
        """Find out shapes and element types; stored ones are not believed."""
        onnx = need("onnx", "from_onnx")
        light = onnx.ModelProto()
        light.CopyFrom(self.model)
        del light.graph.value_info[:], light.graph.initializer[:]
        declared = {value.name for value in light.graph.input}
        for tensor in self.model.graph.initializer:
            count = 1
            for size in tensor.dims:
                count *= size
            if count <= _SMALL and tensor.data_location != 1:
                light.graph.initializer.append(tensor)
            elif tensor.name not in declared:
                light.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                )
        for output in light.graph.output:
            if output.type.HasField("tensor_type"):
                output.type.tensor_type.ClearField("shape")
        try:
            light = onnx.shape_inference.infer_shapes(light, data_prop=True)
        except Exception as error:  # the binding raises several kinds; the network may still be converted
            log.debug("%s: shapes are not known: %s", self.where, error)
        for info in [*light.graph.input, *light.graph.value_info, *light.graph.output]:
            self._note_type(info)

    def _note_type(self, info: Any) -> None:
        if not info.type.HasField("tensor_type"):
            return
        kind = info.type.tensor_type
        self.dtypes[info.name] = dtype_of(kind.elem_type)
        if kind.HasField("shape"):
            self.shapes[info.name] = [
                dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim
            ]

    # Converting.

    def _begin(self) -> None:
        graph = self.model.graph
        for tensor in graph.initializer:
            self.values[tensor.name] = Constant(
                tensor_of(tensor, self.folder, self.where), tensor.name
            )
        if graph.sparse_initializer:
            raise FrontendError(f"{self.where}: sparse initializers are not supported")
        self.input_names = [value.name for value in graph.input if value.name not in self.values]
        for value in graph.input:
            if value.name in self.values:
                continue
            if not value.type.HasField("tensor_type"):
                kind = value.type.WhichOneof("value")
                raise FrontendError(
                    f"{self.where}: the input {value.name!r} is a {kind}; expected a tensor"
                )
            if self.dtypes.get(value.name) is None:
                raise FrontendError(
                    f"{self.where}: torch has no type for the elements of the input {value.name!r}"
                )
            node = self.graph.placeholder(_identifier(value.name))
            node.meta["onnx_name"] = value.name
            self.values[value.name] = node

    def convert_nodes(self, graph: Any) -> list[Value]:
        """Convert the nodes of a graph, or of a sub-graph that sees the values so far; return its outputs."""
        for tensor in graph.initializer if graph is not self.model.graph else ():
            self.values[tensor.name] = Constant(
                tensor_of(tensor, self.folder, self.where), tensor.name
            )
        for number, node in enumerate(graph.node):
            self._convert(node, number)
        missing = [value.name for value in graph.output if value.name not in self.values]
        if missing:
            raise FrontendError(f"{self.where}: nothing computes the output {missing[0]!r}")
        return [self.values[value.name] for value in graph.output]

    def _convert(self, proto: Any, number: int) -> None:
        name = proto.name or f"{proto.op_type}_{number}"
        missing = [source for source in proto.input if source and source not in self.values]
        if missing:
            raise FrontendError(
                f"{self.where}: {proto.op_type} {name!r} reads {missing[0]!r}, which nothing before it computes"
            )
        domain = _domain(proto)
        context = NodeContext(
            self,
            proto.op_type,
            name,
            self.versions.get(domain, 1),
            attribute_values(proto, self.folder, self.where),
            [self.values[source] if source else None for source in proto.input],
            list(proto.input),
            list(proto.output),
        )
        entry = CONVERTERS[domain, proto.op_type]
        self._check_dtypes(context, entry)
        try:
            result = entry.convert(context)
        except FrontendError:
            raise
        except Exception as error:  # a file may hold any attribute and any constant
            raise FrontendError(
                f"{self.where}: {proto.op_type} {name!r} cannot be converted ({type(error).__name__}: {error})"
            ) from error
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for output, value in zip(proto.output, results, strict=False):
            if output:
                self.values[output] = value
        _note_ndim(context, results)
        for output in proto.output[len(results) :]:
            if output:
                context.refuse(f"its output {output!r} is not supported")

    def _check_dtypes(self, node: NodeContext, entry: Entry) -> None:
        """Refuse element types that torch cannot compute with."""
        names = [name for name in (*node.input_names, *node.output_names) if name]
        if entry.dtypes is None:
            return
        for name in names:
            value = self.values.get(name)
            known = isinstance(value, Constant)
            dtype = value.tensor.dtype if known else self.dtypes.get(name)  # type: ignore[union-attr]
            if name in self.dtypes and dtype is None:
                node.refuse(f"torch has no type for the elements of {name!r}")
            if dtype is not None and dtype not in entry.dtypes:
                node.refuse(f"{name!r} holds {dtype}, which is not supported for this operator")

    def _end(self) -> fx.GraphModule:
        outputs = []
        node = NodeContext(self, "output", "output", 1, {}, [], [], [])
        for info in self.model.graph.output:
            if not info.type.HasField("tensor_type"):
                kind = info.type.WhichOneof("value")
                raise FrontendError(
                    f"{self.where}: the output {info.name!r} is a {kind}; expected a tensor"
                )
            value = self.values[info.name]
            if value is None:
                raise FrontendError(f"{self.where}: the output {info.name!r} is left out by its node")
            outputs.append(node.tensor(value))
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        name = _identifier(self.model.graph.name or "OnnxModel")
        draft = fx.GraphModule(self.root, self.graph, class_name=name)
        draft.graph.eliminate_dead_code()
        draft.graph.lint()
        module = fx.GraphModule(draft, draft.graph, class_name=name)  # keeps what the graph uses
        module.input_names = self.input_names  # type: ignore[assignment]
        module.output_names = [info.name for info in self.model.graph.output]  # type: ignore[assignment]
        return module.eval()

    # Modules and tensors of the result.

    def parameter(self, value: Constant, key: str = "", tensor: Tensor | None = None) -> nn.Parameter:
        """Return a parameter with the values of a constant: the same one for the same initializer.

        Args:
            value: the constant.
            key: tells apart different forms of one initializer, such as its transpose.
            tensor: this form, by default the constant itself.
        """
        tensor = (value.tensor if tensor is None else tensor).contiguous()
        if not value.name:
            return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        found = self._parameters.get(f"{value.name}\0{key}")
        if found is None:
            found = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            self._parameters[f"{value.name}\0{key}"] = found
        return found

    def buffer(self, value: Constant) -> fx.Node:
        """Return a node that gives a constant, a buffer of the result."""
        known = self._buffers.get(id(value.tensor))
        if known is not None:
            return known
        path = self._free_path(value.name or "constant", "")
        parent = self._parent(path)
        parent.register_buffer(path.rpartition(".")[2], value.tensor)
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            node = self.graph.get_attr(path)
        else:
            with self.graph.inserting_before(first):
                node = self.graph.get_attr(path)
        self._buffers[id(value.tensor)] = node
        self._kept.append(value.tensor)  # ids stay unique while tensors live
        return node

    def add_module(self, name: str, module: nn.Module, op_type: str) -> str:
        """Put a module into the result under a path made from ``name``; return the path."""
        path = self._free_path(name, op_type)
        self._parent(path).add_module(path.rpartition(".")[2], module)
        return path

    def add_bias(self, node: fx.Node, value: Constant) -> fx.Node | None:
        """Give a constant to the linear layer that ``node`` calls as its bias.

        Returns:
            the node; None if it calls no linear layer without a bias, or something else reads its result.
        """
        if node.op != "call_module" or node.users:
            return None
        layer = self.root.get_submodule(str(node.target))
        if type(layer) is not nn.Linear or layer.bias is not None:
            return None
        if tuple(value.tensor.shape) != (layer.out_features,) or value.tensor.dtype != layer.weight.dtype:
            return None
        if sum(other is node for other in self.values.values()) > 1 or self._reads(node) > 1:
            return None
        layer.bias = self.parameter(value)
        return node

    def _reads(self, node: fx.Node) -> int:
        """Return how many inputs of nodes and outputs of the file read the value of ``node``."""
        names = {name for name, value in self.values.items() if value is node}
        return sum(self.readers[name] for name in names)

    def _free_path(self, name: str, op_type: str) -> str:
        parts = [_identifier(part, digits=True) for part in re.split(r"[./]+", name) if part]
        if op_type and len(parts) > 1 and re.fullmatch(rf"{op_type}(_\d+)?", parts[-1]):
            parts.pop()
        parts = parts[-_DEEPEST:] or ["node"]
        if self._is_free(parts):
            return ".".join(parts)
        flat, count = "_".join(parts), 0
        if flat[0].isdigit():
            flat = f"_{flat}"
        while not self._is_free([candidate := f"{flat}_{count}" if count else flat]):
            count += 1
        return candidate

    def _is_free(self, parts: list[str]) -> bool:
        """Return True if a module or tensor may be put at a path: every step before it is a plain container."""
        parent: nn.Module = self.root
        for part in parts[:-1]:
            if not hasattr(parent, part):
                return True
            child = parent._modules.get(part)
            if type(child) is not nn.Module:
                return False
            parent = child
        return not hasattr(parent, parts[-1])

    def _parent(self, path: str) -> nn.Module:
        parent = self.root
        for part in path.split(".")[:-1]:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        return parent


_SAME_NDIM = frozenset(
    "Relu LeakyRelu Sigmoid Tanh Softmax Identity Cast Clip Erf Sqrt Neg Exp Log Transpose Slice Pad Dropout Gelu Concat "
    "LayerNormalization Conv MaxPool AveragePool BatchNormalization Resize QuantizeLinear DequantizeLinear Tile Abs".split()
)
_BROADCAST = frozenset("Add Sub Mul Div Pow Where MatMul Max Min Sum PRelu Equal Less Greater Expand".split())


def _note_ndim(node: NodeContext, results: list[Value]) -> None:
    """Note how many dimensions the result has where shape inference lost it and the converter can tell."""
    shapes, name = node.importer.shapes, node.output_names[0] if node.output_names else ""
    if name in shapes or not results or not isinstance(results[0], fx.Node):
        return
    ndims = [None if (shape := node.shape(i)) is None else len(shape) for i in range(len(node.inputs)) if node.inputs[i] is not None]
    ndim: int | None = None
    if node.op_type == "Reshape":
        sizes = node.ints(1)
        if sizes is not None:
            shapes[name] = [size if isinstance(size, int) and size > 0 else None for size in sizes]
        return
    if node.op_type in _SAME_NDIM and ndims:
        ndim = ndims[0]
    elif node.op_type in _BROADCAST and None not in ndims:
        ndim = max(n for n in ndims if n is not None)
    elif node.op_type in ("Unsqueeze", "Squeeze") and ndims and ndims[0] is not None:
        axes = node.axes() or []
        ndim = ndims[0] + (len(axes) if node.op_type == "Unsqueeze" else -len(axes))
    elif node.op_type == "Gather" and None not in ndims:
        ndim = sum(n for n in ndims if n is not None) - 1
    if ndim is not None:
        shapes[name] = [None] * ndim


def _domain(node: Any) -> str:
    return "" if node.domain == "ai.onnx" else str(node.domain)


def _operators(graph: Any, depth: int = 0) -> collections.Counter[tuple[str, str]]:
    """Count the operators of a graph and of its sub-graphs.

    Raises:
        FrontendError: sub-graphs are nested too deeply.
    """
    if depth > _DEEPEST:
        raise FrontendError(f"from_onnx: sub-graphs are nested more than {_DEEPEST} deep")
    result: collections.Counter[tuple[str, str]] = collections.Counter()
    for node in graph.node:
        result[_domain(node), node.op_type] += 1
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                result += _operators(attribute.g, depth + 1)
    return result


def _readers(graph: Any) -> collections.Counter[str]:
    """Count how often each tensor is read, by nodes, sub-graphs and outputs."""
    result = collections.Counter(output.name for output in graph.output)
    for node in graph.node:
        result.update(node.input)
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                result += _readers(attribute.g)
    return result


def _identifier(name: str, *, digits: bool = False) -> str:
    """Return ``name`` as a Python identifier; with ``digits`` a number is allowed too, as in paths of modules."""
    clean = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    if clean.isdigit() and digits:
        return clean
    if clean[0].isdigit():
        clean = f"_{clean}"
    return f"{clean}_" if keyword.iskeyword(clean) or hasattr(nn.Module, clean) else clean
