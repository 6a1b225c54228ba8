"""Operators on codes, rewritten as float operators between dequantized and quantized values.

ONNX Runtime's format "QOperator" says ``QLinearConv(x, x_scale, x_zero_point, w, ...)`` where its
format "QDQ" says ``QuantizeLinear(Conv(DequantizeLinear(x), DequantizeLinear(w)))``. Both mean the
same real numbers. Files of the first format are brought into the second, so that their quantizers
and layers are found as in any other quantized file.

The integer operators of ONNX itself are in the standard; those of the domain ``com.microsoft`` are
in ContribOperators.md of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchq.utils.optional import import_optional

__all__ = ["MICROSOFT", "expand_qoperators"]

#: The domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"
_ONE_INPUT = {
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearSigmoid": "Sigmoid",
    "QLinearSoftmax": "Softmax",
}
_TWO_INPUTS = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
#: Attributes of these operators that the float operator does not have.
_EXTRA = frozenset({"channels_last", "opset"})


def expand_qoperators(graph: Any) -> None:
    """Replace operators on codes in a graph, in place.

    Before::

        codes, scale, zero_point, ... -> QLinear<Operator> -> codes

    After::

        codes -> DequantizeLinear -> <Operator> -> QuantizeLinear -> codes

    Args:
        graph: an ``onnx.GraphProto``.
    """
    known = {tensor.name for tensor in graph.initializer}
    nodes: list[Any] = []
    for number, node in enumerate(graph.node):
        expand = _EXPANSIONS.get((node.domain, node.op_type))
        if expand is None or not _is_plain(node, known):
            nodes.append(node)
        else:
            writer = _Writer(node, number)
            expand(writer)
            nodes += writer.nodes
    if len(nodes) != len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)


def _is_plain(node: Any, known: set[str]) -> bool:
    """Return True for an operator that a float operator replaces."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if attributes.get("channels_last"):
        return False
    # Between two computed matrices, sums of codes are computed exactly.
    return node.op_type != "QLinearMatMul" or node.input[3] in known


class _Writer:
    """Writes the nodes that replace one.

    Args:
        node: an ``onnx.NodeProto``.
        number: of the node, for names.
    """

    def __init__(self, node: Any, number: int) -> None:
        self.node = node
        self.nodes: list[Any] = []
        self.inputs: list[str] = list(node.input)
        self._name = node.name or f"{node.op_type}_{number}"
        self._make = import_optional("onnx.helper", "from_onnx").make_node

    def input(self, index: int) -> str:
        """Return the name of an input, "" where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def write(
        self, op_type: str, inputs: Sequence[str], output: str = "", **attributes: Any
    ) -> str:
        """Write a node; return the name of its output."""
        output = output or f"{self.node.output[0]}/{op_type}_{len(self.nodes)}"
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        name = f"{self._name}/{op_type}_{len(self.nodes)}"
        self.nodes.append(self._make(op_type, list(inputs), [output], name, **attributes))
        return output

    def real(self, index: int, axis: int | None = None) -> str:
        """Return the real values of codes that are followed by their scale and zero point."""
        attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
        names = [self.input(index + i) for i in range(3)]
        return self.write("DequantizeLinear", names, **attributes)

    def compute(self, op_type: str, inputs: Sequence[str]) -> str:
        """Write the float operator, with the attributes of the node."""
        result = self.write(op_type, inputs)
        own = [attribute for attribute in self.node.attribute if attribute.name not in _EXTRA]
        self.nodes[-1].attribute.extend(own)
        self.nodes[-1].name = self._name
        return result

    def end(self, value: str, scale: int) -> None:
        """Write the codes of the result; the float result where no scale is given for it."""
        output = self.node.output[0]
        if not self.input(scale):
            self.write("Identity", [value], output)
            return
        self.write("QuantizeLinear", [value, self.input(scale), self.input(scale + 1)], output)

    def bias(self, index: int) -> list[str]:
        """Return a bias of whole numbers as a real one: its scale is that of the products."""
        if not self.input(index):
            return []
        scale = self.write("Mul", [self.input(1), self.input(4)])
        return [self.write("DequantizeLinear", [self.input(index), scale], axis=0)]


def _conv(writer: _Writer) -> None:
    parts = [writer.real(0), writer.real(3, axis=0), *writer.bias(8)]
    writer.end(writer.compute("Conv", parts), 6)


def _matmul(writer: _Writer) -> None:
    writer.end(writer.compute("MatMul", [writer.real(0), writer.real(3, axis=-1)]), 6)


def _gemm(writer: _Writer) -> None:
    transposed = any(a.name == "transB" and a.i for a in writer.node.attribute)
    factors = [a.f for a in writer.node.attribute if a.name == "alpha" and a.f != 1.0]
    parts = [writer.real(0), writer.real(3, axis=0 if transposed else 1)]
    bias = writer.bias(6)
    if factors and bias:
        # The factor belongs to the products, and the bias is stored in their scale.
        product = writer.compute("Gemm", parts)
        scaled = writer.write("Mul", [bias[0], _constant(writer, factors[0])])
        writer.end(writer.write("Add", [product, scaled]), 7)
        return
    writer.end(writer.compute("Gemm", [*parts, *bias]), 7)


def _constant(writer: _Writer, value: float) -> str:
    helper = import_optional("onnx.helper", "from_onnx")
    tensor = helper.make_tensor("factor", 1, [], [value])
    return writer.write("Constant", [], value=tensor)


def _two_inputs(writer: _Writer) -> None:
    op_type = _TWO_INPUTS[writer.node.op_type]
    writer.end(writer.compute(op_type, [writer.real(0), writer.real(3)]), 6)


def _one_input(writer: _Writer) -> None:
    writer.end(writer.compute(_ONE_INPUT[writer.node.op_type], [writer.real(0)]), 3)


def _concat(writer: _Writer) -> None:
    parts = [writer.real(index) for index in range(2, len(writer.inputs), 3)]
    writer.end(writer.compute("Concat", parts), 0)


def _where(writer: _Writer) -> None:
    parts = [writer.input(0), writer.real(1), writer.real(4)]
    writer.end(writer.compute("Where", parts), 7)


_EXPANSIONS: dict[tuple[str, str], Callable[[_Writer], None]] = {
    ("", "QLinearConv"): _conv,
    ("", "QLinearMatMul"): _matmul,
    (MICROSOFT, "QGemm"): _gemm,
    (MICROSOFT, "QLinearConcat"): _concat,
    (MICROSOFT, "QLinearWhere"): _where,
    **{(MICROSOFT, name): _two_inputs for name in _TWO_INPUTS},
    **{(MICROSOFT, name): _one_input for name in _ONE_INPUT},
}
