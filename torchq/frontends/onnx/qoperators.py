"""Files in the format QOperator: operators on codes become pairs around operators on numbers.

ONNX Runtime's quantizer writes QLinearConv and its like, which take codes with their scales and
zero points. Here, before anything else looks at the file, each becomes

    DequantizeLinear -> the operator on numbers -> QuantizeLinear

as the format QDQ has it, so that such a file is read as those are. Operators that only move codes
stand between such pairs too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torchq.errors import FrontendError
from torchq.frontends.onnx.reader import graphs
from torchq.utils.optional import import_optional

_MICROSOFT = "com.microsoft"
#: A tensor of codes, its scale and its zero point, "" where that is left out.
_Codes = tuple[str, str, str]
_NAMES = """DepthToSpace Expand Flatten Gather GatherElements GatherND Identity MaxPool Reshape
    Slice SpaceToDepth Split Squeeze Tile Transpose Unsqueeze"""
#: Operators whose results are some of the elements of their first input.
_MOVING = frozenset(_NAMES.split())


@dataclass
class _Rewriting:
    """The nodes of one graph as far as they were rewritten."""

    where: str
    versions: dict[str, int]
    #: The sizes of stored tensors.
    stored: dict[str, list[int]]
    nodes: list[Any] = field(default_factory=list)
    #: The scales and zero points of codes, by name.
    known: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: The numbers of codes, which several operators may read.
    numbers: dict[tuple[object, ...], str] = field(default_factory=dict)
    added: int = 0

    def add(
        self, op_type: str, inputs: Sequence[str], output: str, **options: Any
    ) -> None:
        """Add a node of the standard."""
        onnx = import_optional("onnx", "from_onnx")
        self.added += 1
        name = options.pop("name", f"{output}_{op_type}")
        inputs = list(inputs)
        while inputs and not inputs[-1]:
            inputs.pop()
        self.nodes.append(
            onnx.helper.make_node(op_type, inputs, [output], name, **options)
        )

    def axis_of(self, scale: str, axis: int | None) -> int | None:
        """Return the axis of several scales, None for one scale."""
        sizes = self.stored.get(scale)
        return None if sizes is not None and math.prod(sizes) == 1 else axis

    def dequantized(self, codes: _Codes, axis: int | None = None) -> str:
        """Return the numbers that codes stand for; ``axis`` is that of several scales."""
        axis = self.axis_of(codes[1], axis)
        key = (*codes, axis)
        if key not in self.numbers:
            name = f"{codes[0]}/numbers"
            if name in self.numbers.values():
                name = f"{name}_{self.added}"
            self.numbers[key] = name
            options = {} if axis is None else {"axis": axis}
            title = f"{codes[0]}_DequantizeLinear"
            self.add("DequantizeLinear", codes, name, name=title, **options)
        return self.numbers[key]

    def quantize(self, numbers: str, codes: _Codes, axis: int | None = None) -> None:
        """Add the node that makes codes of numbers."""
        output, scale, zero_point = codes
        axis = self.axis_of(scale, axis)
        options = {} if axis is None else {"axis": axis}
        title = f"{output}_QuantizeLinear"
        inputs = (numbers, scale, zero_point)
        self.add("QuantizeLinear", inputs, output, name=title, **options)
        if axis is None:
            self.known[output] = scale, zero_point


class _Node:
    """One operator on codes."""

    def __init__(self, proto: Any, number: int, rewriting: _Rewriting) -> None:
        get = import_optional("onnx.helper", "from_onnx").get_attribute_value
        self.proto, self.rewriting = proto, rewriting
        self.op_type = proto.op_type
        self.name = proto.name or f"{proto.op_type}_{number}"
        self.attributes = {entry.name: get(entry) for entry in proto.attribute}
        self.output = proto.output[0]

    def input(self, index: int) -> str:
        """Return the name of an input, "" where it is left out."""
        names = self.proto.input
        return str(names[index]) if index < len(names) else ""

    def codes(self, index: int) -> _Codes:
        """Return the codes at a place, with the scale and zero point behind them."""
        return self.input(index), self.input(index + 1), self.input(index + 2)

    def numbers(self, index: int, axis: int | None = None) -> str:
        """Return the numbers of the codes at a place."""
        return self.rewriting.dequantized(self.codes(index), axis)

    def finish(
        self,
        op_type: str,
        inputs: Iterable[str],
        qparams: int,
        axis: int | None = None,
        **changed: Any,
    ) -> None:
        """Add the operator on numbers, and what makes codes of its result."""
        result = f"{self.output}/float"
        options = self.attributes | changed
        options = {name: value for name, value in options.items() if value is not None}
        is_float = not self.input(qparams)
        output = self.output if is_float else result
        self.rewriting.add(op_type, list(inputs), output, name=self.name, **options)
        if not is_float:
            codes = self.output, self.input(qparams), self.input(qparams + 1)
            self.rewriting.quantize(result, codes, axis)

    def bias(self, index: int, *factors: str) -> str:
        """Return the numbers of a bias, whose scale is the product of others; "" without one."""
        if not self.input(index):
            return ""
        first, *others = factors
        for number, other in enumerate(others):
            product = f"{self.output}/scale_of_bias_{number}"
            self.rewriting.add("Mul", (first, other), product)
            first = product
        return self.rewriting.dequantized((self.input(index), first, ""), 0)

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that this node cannot be rewritten."""
        raise FrontendError(
            f"{self.rewriting.where}: {self.op_type} {self.name!r}: {reason}"
        )


def _convolution(node: _Node) -> None:
    bias = node.bias(8, node.input(1), node.input(4))
    node.finish("Conv", (node.numbers(0), node.numbers(3, 0), bias), 6)


def _product(node: _Node) -> None:
    for index in (1, 4, 6):
        sizes = node.rewriting.stored.get(node.input(index), [])
        if len(sizes) > 1 and math.prod(sizes) > 1:
            node.refuse(
                f"its scales {node.input(index)!r} have the sizes {sizes}; expected one scale, "
                "or one for each row or column"
            )
    # Scales may belong to the rows of the first matrix, and to the columns of the second one.
    node.finish("MatMul", (node.numbers(0, -2), node.numbers(3, -1)), 6, -2)


def _gemm(node: _Node) -> None:
    transposed = bool(node.attributes.get("transB", 0))
    alpha = float(node.attributes.get("alpha", 1.0))
    if alpha != 1.0 and node.input(6):
        node.refuse(f"its alpha is {alpha}, and it has a bias; expected 1")
    bias = node.bias(6, node.input(1), node.input(4))
    inputs = node.numbers(0), node.numbers(3, 0 if transposed else 1), bias
    node.finish("Gemm", inputs, 7)


def _two(op_type: str) -> Callable[[_Node], None]:
    def rewrite(node: _Node) -> None:
        node.finish(op_type, (node.numbers(0), node.numbers(3)), 6)

    return rewrite


def _one(op_type: str) -> Callable[[_Node], None]:
    def rewrite(node: _Node) -> None:
        if node.attributes.get("channels_last", 0):
            node.refuse("its channels are last; expected them behind the batch")
        node.finish(op_type, (node.numbers(0),), 3, channels_last=None)

    return rewrite


def _softmax(node: _Node) -> None:
    version = node.rewriting.versions.get("", 1)
    meant = int(node.attributes.get("opset", version))
    if (meant >= 13) != (version >= 13):
        node.refuse(
            f"it is meant as in opset {meant}; expected that of the file, {version}"
        )
    node.finish("Softmax", (node.numbers(0),), 3, opset=None)


def _where(node: _Node) -> None:
    node.finish("Where", (node.input(0), node.numbers(1), node.numbers(4)), 7)


def _concat(node: _Node) -> None:
    parts = range(2, len(node.proto.input), 3)
    node.finish("Concat", [node.numbers(index) for index in parts], 0)


_FORMS: dict[tuple[str, str], Callable[[_Node], None]] = {
    ("", "QLinearConv"): _convolution,
    ("", "QLinearMatMul"): _product,
    (_MICROSOFT, "QGemm"): _gemm,
    (_MICROSOFT, "QLinearAdd"): _two("Add"),
    (_MICROSOFT, "QLinearMul"): _two("Mul"),
    (_MICROSOFT, "QLinearSigmoid"): _one("Sigmoid"),
    (_MICROSOFT, "QLinearLeakyRelu"): _one("LeakyRelu"),
    (_MICROSOFT, "QLinearAveragePool"): _one("AveragePool"),
    (_MICROSOFT, "QLinearGlobalAveragePool"): _one("GlobalAveragePool"),
    (_MICROSOFT, "QLinearSoftmax"): _softmax,
    (_MICROSOFT, "QLinearWhere"): _where,
    (_MICROSOFT, "QLinearConcat"): _concat,
}


def with_pairs_(model: Any, where: str) -> None:
    """Put pairs around operators on numbers in the place of operators on codes, in place."""
    versions = {_domain(entry): entry.version for entry in model.opset_import}
    stored: dict[str, list[int]] = {}
    for graph in list(graphs(model.graph, where)):
        stored |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        if not any((_domain(node), node.op_type) in _FORMS for node in graph.node):
            continue
        rewriting = _Rewriting(where, versions, stored)
        for number, proto in enumerate(graph.node):
            rewrite = _FORMS.get((_domain(proto), proto.op_type))
            if rewrite is not None:
                rewrite(_Node(proto, number, rewriting))
            elif not _moved(proto, rewriting):
                rewriting.nodes.append(proto)
                _note_codes(proto, rewriting)
        del graph.node[:]
        graph.node.extend(rewriting.nodes)


def _domain(message: Any) -> str:
    return "" if message.domain == "ai.onnx" else str(message.domain)


def _note_codes(proto: Any, rewriting: _Rewriting) -> None:
    """Note the scale and zero point of codes that the file makes itself."""
    if proto.op_type != "QuantizeLinear" or _domain(proto) or len(proto.input) < 3:
        return
    if not proto.attribute:
        rewriting.known[proto.output[0]] = proto.input[1], proto.input[2]


def _moved(proto: Any, rewriting: _Rewriting) -> bool:
    """Rewrite an operator that moves codes as one that moves numbers; return False for others."""
    known = rewriting.known.get(proto.input[0]) if proto.input else None
    if known is None or _domain(proto) or not _only_moves(proto):
        return False
    moved = type(proto)()
    moved.CopyFrom(proto)
    moved.input[0] = rewriting.dequantized((proto.input[0], *known))
    outputs = list(_codes_of(proto))
    for index in outputs:
        moved.output[index] = f"{proto.output[index]}/float"
    rewriting.nodes.append(moved)
    for index in outputs:
        codes = proto.output[index], *known
        rewriting.quantize(moved.output[index], codes)
    return True


def _only_moves(proto: Any) -> bool:
    if proto.op_type == "Resize":
        modes = [entry.s for entry in proto.attribute if entry.name == "mode"]
        return modes in ([], [b"nearest"])
    return proto.op_type in _MOVING


def _codes_of(proto: Any) -> Iterator[int]:
    """Yield which outputs of an operator that moves codes are codes."""
    for index, name in enumerate(proto.output):
        if name and (index == 0 or proto.op_type == "Split"):
            yield index
