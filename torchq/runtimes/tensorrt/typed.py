"""Strongly typed files: one float type throughout, and float32 where it would overflow or lose."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.formats import SCALE_TYPES, ScaleType
from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    bypass,
    computed_by,
    data_type,
    fresh_name,
    is_constant,
    is_output,
    names,
    nodes_of,
    onnx_ir,
    opset_of,
    readers,
    replace_stored,
    value_of,
)
from torchq.onnx.passes.constants import known_types
from torchq.onnx.qdq import pair_name, write_record
from torchq.runtimes.checks import layer_name
from torchq.runtimes.tensorrt.recorded import recorded_ranges
from torchq.utils.optional import import_optional

#: The first opset whose pairs have scales of another type than float32.
OPSET = 19
#: One example does not show the largest value that a tensor ever has.
_MARGIN = 2.0
#: A number that is further away from its nearest one of the type loses what it is for, as the
#: smallest addends of divisors do.
_LOSS = 0.01
MOVES = names(
    "Concat Expand Flatten Gather GatherElements Identity Pad Reshape Slice Split Squeeze Tile "
    "Transpose Unsqueeze"
)
#: What passes on numbers that are too large, such as those that hide places from attention.
_CARRIES = MOVES | names("Add Max Min Neg Sub Where")
#: Their results are float32 unless an attribute says otherwise, or what they compute is a list.
_FLOAT32 = names(
    "Bernoulli EyeLike Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike "
    "ConcatFromSequence SequenceAt SequenceConstruct SequenceInsert SplitToSequence"
)

#: What computes places in tables and lengths, number by number.
_ARITHMETIC = names(
    "Abs Add Cast Ceil Clip Div Exp Floor Log Max Min Mul Neg Pow Round Sqrt Sub Where"
)


def store_typed(model: Model) -> None:
    """Give all float tensors of a graph one type, but for those that it cannot hold.

    Before: Float tensors, scales and stored numbers are float32.
    After: They have the type of the runtime's ``precision``; inputs and outputs are float32, unless
    ``typed_io`` asks for that type. A QuantizeLinear has scales of the type that it reads, a
    DequantizeLinear those of the type that its layer wants, so none has a Cast behind it. Nodes
    that read or compute what the type cannot hold are float32, with scales of their own; the record
    says which, and why. Casts stand between them and others, and behind inputs and before outputs.
    A model that is float16 or bfloat16 itself keeps its type.
    """
    runtime = model.meta["runtime"]
    if runtime.precision == "float32":
        return
    precision = _own_type(model) or runtime.precision
    if opset_of(model) < OPSET:
        raise ExportError(
            f"export_onnx: opset {opset_of(model)} has no scales in {runtime.precision}; expected "
            f"{OPSET} or later. Leave opset= out, or pass a runtime with precision='float32'"
        )
    scales = SCALE_TYPES[precision]
    typing = _Typing(model, scales, runtime.typed_io)
    typing.refuse()
    ranges, missing = recorded_ranges(model, model.meta["feeds"]())
    typing.keep(ranges)
    typing.rewrite()
    write_record(
        model,
        precision=precision,
        kept={
            str(node.name): f"{_place(node)}: {why}"
            for node, why in typing.kept.items()
        },
        infinite=typing.infinite,
        rounded=[*typing.rounded],
        unrecorded=missing,
    )


class _Typing:
    """The types of the values of one graph."""

    def __init__(self, model: Model, scales: ScaleType, typed_io: bool) -> None:
        self.model = model
        self.graph = model.graph
        self.scales = scales
        self.typed_io = typed_io
        self.short = onnx_ir.DataType[scales.name.upper()]
        self.long = onnx_ir.DataType.FLOAT
        _remove_idle_casts(model)
        self.types = known_types(model)
        self.kept: dict[Node, str] = {}
        self.infinite: list[str] = []
        self.rounded: dict[str, None] = {}
        self._made: dict[tuple[Value, DataType], Value] = {}

    def refuse(self) -> None:
        """Raise ExportError for loops and branches, whose insides read tensors from outside."""
        for node in self.graph:
            if any(
                a.type.name in ("GRAPH", "GRAPHS") for a in node.attributes.values()
            ):
                raise ExportError(
                    f"export_onnx: {node.name}: is a loop or branch ({node.op_type}); expected "
                    "none in a strongly typed file. Pass a runtime with precision='float32'"
                )

    # --- what stays in float32 ----------------------------------------------------------------

    def keep(self, ranges: Mapping[str, float]) -> None:
        """Choose the nodes that stay in float32, with the reason of each."""
        wide: dict[Value, str] = {}
        large: set[Value] = set()
        for value, is_scale in self._floats():
            why = "" if is_scale else self._why(value, ranges.get(str(value.name), 0.0))
            if why:
                wide[value] = why
            if why and is_constant(value) and float(value_of(value).abs().max()) > 1:
                large.add(value)
        for node in self.graph:
            # It has the type of what it reads, or of what reads it.
            if not _is_pair(node):
                self._keep_if_wide(node, wide, large)
        self._keep_what_becomes_whole()
        self._keep_moves()

    def _floats(self) -> Iterator[tuple[Value, bool]]:
        """Yield each float32 value once, and whether it is the scale of a pair."""
        yielded: set[Value | None] = {None}
        for node in self.graph:
            for value in (*node.inputs, *node.outputs):
                if value not in yielded and self.types.get(value.name) == self.long:
                    yielded.add(value)
                    yield value, _is_pair(node) and node.inputs[1] is value

    def _keep_if_wide(
        self, node: Node, wide: dict[Value, str], large: set[Value]
    ) -> None:
        """Keep a node that reads or computes a wide value; note what it makes of stored ones.

        Whatever the example shows, numbers that are too large are in the result of an addition or
        a choice among them. What reads a stored number that loses its digits has a result with
        digits that must not be lost either.
        """
        read = [v for v in node.inputs if v in wide and self._takes_short(node, v)]
        wide_values = [*read, *(v for v in node.outputs if v in wide)]
        if not wide_values and not self._must_be_long(node):
            return
        self.kept[node] = (
            wide[wide_values[0]] if wide_values else f"{node.op_type} has no other type"
        )
        is_large = not large.isdisjoint(read) and node.op_type in _CARRIES
        if is_large or any(map(is_constant, read)):
            for value in node.outputs:
                wide.setdefault(value, self.kept[node])
        if is_large:
            large.update(node.outputs)

    def _why(self, value: Value, recorded: float) -> str:
        """Return why the short type cannot hold a value; "" if it can."""
        margin = _MARGIN
        what = f"a range of {recorded:.3g}"
        if is_constant(value):
            numbers = value_of(value).float().abs()
            finite = numbers[numbers.isfinite()]
            recorded = float(finite.max()) if finite.numel() else 0.0
            margin = 1.0
            what = f"the stored number {recorded:.3g}"
            if numbers.numel() == 1 and self._loses(recorded):
                return what
        elif 0 < recorded < self.scales.least:
            return what
        return what if recorded * margin > self.scales.qmax else ""

    def _loses(self, number: float) -> bool:
        near = float(torch.tensor(number).to(self.scales.dtype))
        return abs(near - number) > _LOSS * number and number < 1

    def _must_be_long(self, node: Node) -> bool:
        if node.op_type in _FLOAT32 or not schema_of(node, opset_of(self.model)):
            return any(self.types.get(v.name) == self.long for v in node.outputs)
        return any(
            self.types.get(value.name) == self.long
            and not self._allows(node, index, True)
            for index, value in enumerate(node.outputs)
        )

    def _keep_what_becomes_whole(self) -> None:
        """Keep arithmetic whose result is cut to a whole number, such as a place in a table.

        A number that is next to a whole one in the short type may be on its other side.
        """
        pending = [
            node.inputs[0]
            for node in nodes_of(self.model, "Cast")
            if onnx_ir.DataType(attribute(node, "to")).is_integer()
        ]
        while pending:
            node = computed_by(pending.pop(), *_ARITHMETIC)
            if node is None or node in self.kept:
                continue
            if self.types.get(node.outputs[0].name) == self.long:
                self.kept[node] = "whole numbers are made of it"
                pending += [value for value in node.inputs if value is not None]

    def _keep_moves(self) -> None:
        """Keep what only moves values from a DequantizeLinear to layers that stay in float32."""
        for node in reversed([*self.graph]):
            if node.op_type not in MOVES or node in self.kept:
                continue
            source = computed_by(node.inputs[0])
            while source is not None and source.op_type in MOVES:
                source = computed_by(source.inputs[0])
            users = readers(node.outputs[0])
            if source is None or source.op_type != "DequantizeLinear" or not users:
                continue
            if all(user in self.kept for user in users) and not is_output(
                node.outputs[0]
            ):
                self.kept[node] = self.kept[users[0]]

    # --- types --------------------------------------------------------------------------------

    def _allows(self, node: Node, index: int, result: bool = False) -> bool:
        """Return True if an operator may have the short type in a place."""
        schema = schema_of(node, opset_of(self.model))
        formal = None if schema is None else formal_of(schema, index, result)
        return formal is not None and f"tensor({self.scales.name})" in formal.types

    def _takes_short(self, node: Node, value: Value) -> bool:
        return any(
            v is value and self._allows(node, i) for i, v in enumerate(node.inputs)
        )

    def type_of(self, value: Value) -> DataType:
        """Return the type that a float32 value will have; stored ones have any."""
        node = value.producer()
        if node is None:
            return self.short if self.typed_io and not is_constant(value) else self.long
        index = value.index()
        if node in self.kept or not self._allows(node, index, True):
            return self.long
        return self.short

    def _wanted(self, node: Node, index: int) -> DataType | None:
        """Return the type that a node wants to read; None for any."""
        if node.op_type == "Cast":
            pair = computed_by(node.inputs[0], "DequantizeLinear")
            return None if pair is None else self.short
        if node.op_type == "QuantizeLinear":
            source = node.inputs[0]
            return self.short if is_constant(source) else self.type_of(source)
        return (
            self.long
            if node in self.kept or not self._allows(node, index)
            else self.short
        )

    def rewrite(self) -> None:
        """Give each node what it wants to read, and each value its type."""
        self._round_scales()
        nodes = list(self.graph)
        outputs = list(self.graph.outputs)
        pairs = [n for n in nodes if n.op_type == "DequantizeLinear"]
        for node in nodes:
            if node not in pairs:
                self._type_inputs(node)
                self._set_attributes(node)
        for position, value in enumerate(outputs):
            if self.types.get(value.name) == self.long:
                self._return(position, value)
        for node in pairs:
            if not readers(node.outputs[0]) and not is_output(node.outputs[0]):
                self.graph.remove(node, safe=True)
        values = [
            value for node in nodes if node not in pairs for value in node.outputs
        ]
        for value in (*values, *(self.graph.inputs if self.typed_io else ())):
            if self.types.get(value.name) == self.long:
                value.type = onnx_ir.TensorType(self.type_of(value))
        _remove_idle_casts(self.model)

    def _round_scales(self) -> None:
        """Give pairs of a model that was planned without the type scales that are numbers of it."""
        for node in filter(_is_pair, list(self.graph)):
            if (
                not is_constant(node.inputs[1])
                or data_type(node.inputs[1]) != self.long
            ):
                continue
            scale = value_of(node.inputs[1])
            near = scale.to(self.scales.dtype).float()
            if (
                near.isfinite().all()
                and (near > 0).all()
                and not torch.equal(near, scale)
            ):
                replace_stored(node.inputs[1], near)
                self.rounded[pair_name(node)] = None

    def _type_inputs(self, node: Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is None or self.types.get(value.name) != self.long:
                continue
            dtype = self._wanted(node, index)
            if dtype is None:
                continue
            if node.op_type == "QuantizeLinear" and index == 1 and dtype == self.short:
                self._check_scale(node, value_of(value))
            node.replace_input_with(index, self._typed(value, dtype))

    def _set_attributes(self, node: Node) -> None:
        """Let a Cast, and a tensor of one number, give the type that its result has."""
        dtype = self.type_of(node.outputs[0])
        if self.types.get(node.outputs[0].name) != self.long or dtype == self.long:
            return
        if node.op_type == "Cast":
            node.attributes["to"] = onnx_ir.AttrInt64("to", dtype.value)
        elif node.op_type == "ConstantOfShape":
            fill = attribute(node, "value")
            number = 0.0 if fill is None else float(fill.numpy().reshape(-1)[0])
            stored = onnx_ir.tensor([number], dtype=dtype)
            node.attributes["value"] = onnx_ir.AttrTensor("value", stored)

    def _return(self, position: int, value: Value) -> None:
        """Return a value in the type of outputs, under its name."""
        dtype = self.short if self.typed_io else self.long
        name = str(value.name)
        if (
            computed_by(value, "DequantizeLinear") is None
            and self.type_of(value) == dtype
        ):
            return
        if value.producer() is None:
            return
        value.name = fresh_name(self.graph, f"{name}/inside")
        self.types[value.name] = self.long
        new = self._typed(value, dtype)
        new.name = name
        new.shape = value.shape
        self.types[name] = dtype
        self.graph.outputs[position] = new

    def _typed(self, value: Value, wanted: DataType) -> Value:
        """Return a value in a type: stored, dequantized to it, or cast."""
        typed = self._made.get((value, wanted))
        if typed is None:
            typed = self._made[value, wanted] = self._new(value, wanted)
        return typed

    def _new(self, value: Value, wanted: DataType) -> Value:
        name = f"{value.name}/{wanted.name.lower()}"
        if is_constant(value):
            return self._stored(value, wanted)
        pair = computed_by(value, "DequantizeLinear")
        if pair is not None and is_constant(pair.inputs[1]):
            return self._dequantized(pair, wanted)
        if self.type_of(value) == wanted:
            return value
        settings = {"to": wanted.value}
        if value.producer() is not None:
            new = add_node(value.producer(), "Cast", [value], name, settings)
        else:
            new = onnx_ir.Value(name=fresh_name(self.graph, name))
            cast = onnx_ir.node("Cast", [value], settings, outputs=[new], name=new.name)
            self.graph.insert_before(self.graph[0], cast)
        new.type = onnx_ir.TensorType(wanted)
        new.shape = value.shape
        return new

    def _stored(self, value: Value, wanted: DataType) -> Value:
        """Return stored numbers in a type; those that do not fit the short one are noted."""
        if wanted == self.long:
            return value
        numbers = value_of(value)
        short = numbers.to(self.scales.dtype)
        new = add_initializer(self.graph, f"{value.name}/{self.scales.name}", short)
        if bool(numbers.isinf().any()):
            self.infinite.append(str(new.name))
        return new

    def _dequantized(self, pair: Node, wanted: DataType) -> Value:
        """Return the values of codes in a type, by a DequantizeLinear with scales of that type."""
        inputs = list(pair.inputs)
        scale = value_of(inputs[1])
        if wanted == self.short:
            self._check_scale(pair, scale)
        inputs[1] = self._typed(inputs[1], wanted)
        first = not any(
            (pair.outputs[0], t) in self._made for t in (self.short, self.long)
        )
        name = (
            str(pair.name)
            if first
            else fresh_name(self.graph, f"{pair.name}#{wanted.name}")
        )
        if first:
            pair.name = f"{name}/replaced"
        value = onnx_ir.Value(name=fresh_name(self.graph, f"{pair.outputs[0].name}"))
        new = onnx_ir.node(
            "DequantizeLinear",
            inputs,
            dict(pair.attributes),
            outputs=[value],
            name=name,
        )
        new.meta.update(pair.meta)
        value.type = onnx_ir.TensorType(wanted)
        value.shape = pair.outputs[0].shape
        pair.append(new)
        return value

    def _check_scale(self, pair: Node, scale: Tensor) -> None:
        """Raise ExportError for scales that the type cannot hold."""
        low = float(scale.min())
        high = float(scale.max())
        if low < self.scales.least or high > self.scales.qmax:
            raise ExportError(
                f"{pair_name(pair)}: has scales from {low:.3g} to {high:.3g}, and "
                f"{self.scales.name} holds {self.scales.least:.3g} to {self.scales.qmax:g}; call "
                "torchq.quantize_ with this target before calibration, which rounds them so, or "
                "pass a runtime with precision='float32'"
            )


def _own_type(model: Model) -> str | None:
    """Return the name of the short float type that a model computes in by itself."""
    short_types = {dtype.name.lower() for dtype in known_types(model).values()} & set(
        SCALE_TYPES
    )
    if len(short_types) > 1:
        raise ExportError(
            "export_onnx: the model computes in float16 and in bfloat16; expected one of them. "
            "Export copy.deepcopy(model).float() with a float32 example"
        )
    return next(iter(short_types), None)


def _place(node: Node) -> str:
    """Return the operator of a node and the module that it comes from."""
    module = layer_name(node)
    if module in (node.name, node.outputs[0].name):
        scopes = [
            v for k, v in node.metadata_props.items() if k.endswith("name_scopes")
        ]
        parts = [part for part in literal_eval(scopes[0]) if part] if scopes else []
        module = parts[-2] if len(parts) > 1 else ""
    return f"{node.op_type} in {module}" if module else str(node.op_type)


def _is_pair(node: Node) -> bool:
    return node.op_type in ("QuantizeLinear", "DequantizeLinear")


def _remove_idle_casts(model: Model) -> None:
    """Remove casts of values that have the type already."""
    types = known_types(model)
    for node in nodes_of(model, "Cast"):
        if types.get(node.inputs[0].name) == onnx_ir.DataType(attribute(node, "to")):
            bypass(node)


@cache
def _known_schema(op_type: str, opset: int) -> object:
    defs = import_optional("onnx", "export_onnx").defs
    return defs.get_schema(op_type, opset) if defs.has(op_type, opset) else None


def schema_of(node: Node, opset: int) -> Any:
    """Return what the standard says of an operator; None for those of others."""
    return None if node.domain else _known_schema(str(node.op_type), opset)


def formal_of(schema: Any, index: int, result: bool) -> Any:
    """Return what a schema says of an input or output; the last one may stand for more."""
    formals = schema.outputs if result else schema.inputs
    return formals[min(index, len(formals) - 1)] if formals else None
