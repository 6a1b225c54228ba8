"""Marks where quantizers are called in a traced graph, and the Q/DQ pairs in their places.

What torch's exporters spend on a graph is spent on each of its nodes, several times. So the
exporter that is based on ``torch.export`` sees as little of a quantizer as it can: a copy of its
input, which becomes an Identity that names the module; of a quantizer of a parameter nothing but
the parameter; and no range. The pairs are written into the ONNX graph afterwards.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.formats import Format
from torchq.functional.onnx_ops import (
    FOUR_BITS,
    MARK,
    OnnxType,
    as_stored,
    clip_bounds,
    mark,
    onnx_axis,
    stored_type,
)
from torchq.nn import TensorQuantizer
from torchq.onnx.interface import named_calls
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    onnx_ir,
    replace_value,
)
from torchq.onnx.qdq import path_of

#: A buffer that the quantizer of a parameter has during an export: what it is to quantize.
_STORED = "stored_parameter"
_SLOT_END = "_quantizer"
#: Ends the key under which the exporter notes the modules that a node comes from.
_SCOPES = "name_scopes"


class MarksLost(ExportError):
    """A quantizer was called, and the graph does not say where."""


class Marks:
    """The quantizers whose marks the graph names by their module, by path."""

    def __init__(
        self, model: nn.Module, quantizers: Mapping[str, TensorQuantizer]
    ) -> None:
        self._quantizers = quantizers
        path_by_object = {id(module): path for path, module in quantizers.items()}
        self._path_by_alias = {
            alias: path_by_object[id(module)]
            for alias, module in model.named_modules(remove_duplicate=False)
            if id(module) in path_by_object
        }
        #: The paths of quantizers that returned a copy, or the buffer of a parameter.
        self.copied: set[str] = set()
        self.stored: set[str] = set()

    def place(self, model: Model) -> None:
        """Write the marks of :func:`torchq.functional.onnx_ops.mark` into a new graph.

        Before: An Identity with the scope of a quantizer stands where that is called first. A
        parameter that a quantizer reads is a stored tensor with a name of its own.
        After: A mark has the dotted path of the quantizer, in both cases.

        Raises:
            MarksLost: A quantizer that was called has no Identity, or one that is not known; or a
                parameter that it reads is read without it.
        """
        placed = set()
        # A module with several paths has any of them in the graph.
        stored_values = {
            f"{alias}.{_STORED}": path
            for alias, path in self._path_by_alias.items()
            if path in self.stored
        }
        for node in list(model.graph):
            path = self._path_of_scope(node)
            if path in self.copied and path not in placed:
                placed.add(path)
                marked = self._insert(node, node.inputs[0], path)
                replace_value(node.outputs[0], marked)
                model.graph.remove(node, safe=True)
            for value in {*node.inputs}:
                stored_path = stored_values.get("" if value is None else value.name)
                if stored_path is not None:
                    self._mark_stored(node, value, stored_path)
                    del stored_values[value.name]
        self._check_stored(model)
        if placed != self.copied:
            missing = min(self.copied - placed)
            raise MarksLost(
                f"export_onnx: {missing}: got no node of it in the graph that torch made; "
                "expected one. Pass dynamo=False for torch's other exporter"
            )
        model.graph.opset_imports[MARK[0]] = 1

    def _check_stored(self, model: Model) -> None:
        """Raise MarksLost for a parameter that is read without the mark of its quantizer."""
        for node in model.graph:
            for value in node.inputs:
                is_stored = value is not None and str(value.name).endswith(_STORED)
                if is_stored and node.domain != MARK[0]:
                    raise MarksLost(
                        f"export_onnx: {value.name}: got a reader of a quantized parameter "
                        f"without its quantizer, {node.name}; expected a mark between. Pass "
                        "dynamo=False for torch's other exporter"
                    )

    def _path_of_scope(self, node: Node) -> str | None:
        """Return the path of the quantizer that an Identity comes from."""
        if node.op_type != "Identity":
            return None
        scopes = [v for k, v in node.metadata_props.items() if k.endswith(_SCOPES)]
        modules = literal_eval(scopes[0])[:-1] if scopes else []
        return self._path_of(modules[-1]) if modules else None

    def _path_of(self, module: str) -> str | None:
        """Return the path of a quantizer, given its path, behind whatever stands before it.

        Where torch falls back to tracing Python's bytecode, it names a module by the way on which
        it met the module first, such as ``x.__closure__[0].cell_contents.head.input_quantizer``.
        """
        while module not in self._path_by_alias and module:
            module = module.partition(".")[2]
        return self._path_by_alias.get(module)

    def _mark_stored(self, first_reader: Node, value: Value, path: str) -> None:
        """Let all readers of a stored tensor read a mark in front of the first of them."""
        uses = list(value.uses())
        marked = self._insert(first_reader, value, path)
        for user, index in uses:
            user.replace_input_with(index, marked)

    def _insert(self, before: Node, value: Value, path: str) -> Value:
        """Insert the mark of a quantizer in front of a node."""
        granularity = self._quantizers[path].descriptor.granularity
        axis, _ = onnx_axis(granularity, len(value.shape))
        output = onnx_ir.Value(
            name=f"{path}/marked", type=value.type, shape=value.shape
        )
        attributes = {"name": path, "axis": -1 if axis is None else axis}
        node = onnx_ir.node(
            MARK[1],
            [value],
            attributes,
            domain=MARK[0],
            outputs=[output],
            name=f"{path}/mark",
        )
        before.prepend(node)
        return output


@contextmanager
def marking(
    model: nn.Module,
    quantizers: Mapping[str, TensorQuantizer],
    opset: int,
    by_scope: bool,
) -> Iterator[Marks]:
    """Let quantizers write a mark inside the ``with`` block, for :func:`write_pairs`.

    Args:
        model: what is traced.
        quantizers: of the model, by path.
        opset: of the file.
        by_scope: The exporter notes the module of each node, so that a copy is mark enough;
            :meth:`Marks.place` then has to write the marks.
    """
    bounds = {}
    for path, quantizer in quantizers.items():
        scale, point, stored, _ = _grid(quantizer, opset)
        axis, block = onnx_axis(quantizer.descriptor.granularity, scale.dim())
        if axis is not None and block:
            scale, point = scale.unsqueeze(axis + 1), point.unsqueeze(axis + 1)
        bounds[path] = clip_bounds(scale, point, quantizer.descriptor.format, stored)
    marks = Marks(model, quantizers)

    def write(name: str, quantizer: TensorQuantizer, x: Tensor, out: Tensor) -> Tensor:
        path = path_of(name)
        if by_scope and name == path and _reads_parameter(model, path, quantizer, x):
            marks.stored.add(path)
            result = quantizer.get_buffer(_STORED)
            return result if result.dtype is x.dtype else result.to(x.dtype)
        granularity = quantizer.descriptor.granularity
        values = as_stored(out, bounds[path], granularity)
        if by_scope and name == path:
            marks.copied.add(path)
            result = values.clone()
        else:  # a second call has the scope of the first
            axis, _ = onnx_axis(granularity, out.dim())
            result = mark(values, name, -1 if axis is None else axis)
        return result if result.dtype is x.dtype else result.to(x.dtype)

    with ExitStack() as stack:
        if by_scope:
            stack.enter_context(_parameters_stored(model, quantizers, bounds))
            for quantizer in quantizers.values():
                stack.enter_context(quantizer.range_hidden(but=_STORED))
        stack.enter_context(_passing_through(quantizers))
        stack.enter_context(named_calls(model, quantizers, write))
        yield marks


@contextmanager
def _passing_through(quantizers: Mapping[str, TensorQuantizer]) -> Iterator[None]:
    """Let quantizers return their input, times their ``pre_quant_scale``."""
    try:
        for quantizer in quantizers.values():
            quantizer.delegate = _as_it_is
        yield
    finally:
        for quantizer in quantizers.values():
            quantizer.delegate = None


def _as_it_is(x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Return the input of a quantizer, times its ``pre_quant_scale``; it is a delegate."""
    return x


@contextmanager
def _parameters_stored(
    model: nn.Module,
    quantizers: Mapping[str, TensorQuantizer],
    bounds: Mapping[str, tuple[Tensor, Tensor] | None],
) -> Iterator[None]:
    """Give quantizers of parameters a buffer with the values that they are to quantize."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    try:
        for path, quantizer in quantizers.items():
            parameter = parameters.get(path.removesuffix(_SLOT_END))
            if parameter is not None and quantizer.pre_quant_scale is None:
                granularity = quantizer.descriptor.granularity
                values = as_stored(parameter.detach(), bounds[path], granularity)
                quantizer.register_buffer(_STORED, values)
        yield
    finally:
        for quantizer in quantizers.values():
            if hasattr(quantizer, _STORED):
                delattr(quantizer, _STORED)


def _reads_parameter(
    model: nn.Module, path: str, quantizer: TensorQuantizer, x: Tensor
) -> bool:
    """Return True if a quantizer is called with the parameter that its buffer stands for."""
    if not hasattr(quantizer, _STORED):
        return False
    owner, _, name = path.removesuffix(_SLOT_END).rpartition(".")
    return getattr(model.get_submodule(owner), name) is x


def _grid(
    quantizer: TensorQuantizer, opset: int
) -> tuple[Tensor, Tensor, Format, OnnxType]:
    """Return scale, zero point and type of a quantizer as a file holds them."""
    d = quantizer.descriptor
    axis, _ = onnx_axis(d.granularity, 1 << 16)
    with torch.no_grad():
        scale, point = quantizer.calculate_qparams()
    stored, kind = stored_type(
        d.format, axis if d.symmetric else None, wide=opset < FOUR_BITS
    )
    return scale.float(), point, stored, kind


def write_pairs(
    model: Model, quantizers: Mapping[str, TensorQuantizer], opset: int
) -> None:
    """Put the pair of a quantizer in the place of each mark.

    Before: Where a quantizer is called, a mark has its dotted path; the second call of one
    quantizer is marked ``path#2``, and so on.
    After: No mark is left. There are nodes ``path/QuantizeLinear`` and ``path/DequantizeLinear``,
    with outputs ``path/codes`` and ``path/value``. A node's ``meta["format"]`` is the name of the
    format of its quantizer.
    """
    for node in [node for node in model.graph if (node.domain, node.op_type) == MARK]:
        name = attribute(node, "name")
        axis = attribute(node, "axis")
        _write_pair(node, name, axis, quantizers[path_of(name)], opset)
    model.graph.opset_imports.pop(MARK[0], None)


def _write_pair(
    node: Node, name: str, axis: int, quantizer: TensorQuantizer, opset: int
) -> None:
    graph = node.graph
    d = quantizer.descriptor
    result = node.outputs[0]
    scale, point, _, kind = _grid(quantizer, opset)
    block = onnx_axis(d.granularity, 1 << 16)[1]
    if axis >= 0 and not block:
        scale, point = scale.reshape(-1), point.reshape(-1)
    dtype = onnx_ir.DataType[kind.name]
    settings = {} if axis < 0 else {"axis": axis}
    if block:
        settings["block_size"] = block
    typed = settings
    parameters = [add_initializer(graph, f"{name}/scale", scale)]
    if dtype.bitwidth == 4:
        typed = {**settings, "output_dtype": dtype.value}
    else:
        zeros = point.to(kind.dtype)
        parameters.append(add_initializer(graph, f"{name}/zero_point", zeros))
    codes = add_node(
        node, "QuantizeLinear", [node.inputs[0], *parameters], f"{name}/codes", typed
    )
    # The mark's own shape is that of the example where TorchScript writes it.
    codes.type = onnx_ir.TensorType(dtype)
    codes.shape = node.inputs[0].shape
    pair = codes.producer()
    value = add_node(
        pair, "DequantizeLinear", [codes, *parameters], f"{name}/value", settings
    )
    value.type = result.type
    value.shape = node.inputs[0].shape
    for one in (pair, value.producer()):
        one.name = f"{name}/{one.op_type}"
        one.meta["format"] = d.format.name
    replace_value(result, value)
    graph.remove(node, safe=True)
