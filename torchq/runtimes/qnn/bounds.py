"""How far codes of the emulator may be off where a layer is given equal codes: one table.

The figures are what was seen of the emulator in layers and networks, one after the other. They say
nothing of how it computes, and nothing of silicon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchq.onnx.ir import Node, Value, attribute, is_constant, names
from torchq.onnx.qdq import element_type
from torchq.runtime import LayerBound
from torchq.runtimes.checks import scales_of

_SUMS = names("Add Sub")
#: What may stand between a stored weight and its layer.
_STORED_THROUGH = names("DequantizeLinear Transpose Cast Reshape")
_RECURRENT = names("GRU LSTM RNN")
_PRODUCTS = names("MatMul Gemm")
_IN_FLOAT = names(
    "Div Elu Erf Exp GRU Gelu GroupNormalization HardSigmoid HardSwish InstanceNormalization LSTM "
    "LayerNormalization Log Mul PRelu Pow RNN ReduceMean Sigmoid Softmax Softplus Sqrt Tanh"
)
#: Scales are taken for equal, or for twice another, within this.
_NEAR = 0.01


@dataclass(frozen=True)
class Between:
    """What stands between codes and the codes that they are computed from.

    Attributes:
        quantize: writes the codes.
        operators: the nodes between.
        inputs: the DequantizeLinear nodes of activations in front of them.
    """

    quantize: Node
    operators: tuple[Node, ...]
    inputs: tuple[Node, ...]

    @classmethod
    def of(cls, quantize: Node) -> Between:
        """Return what stands in front of a QuantizeLinear."""
        operators: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        pending: list[Value | None] = [quantize.inputs[0]]
        while pending:
            value = pending.pop()
            node = None if value is None else value.producer()
            if node is None or node in operators:
                continue
            if node.op_type == "DequantizeLinear" and _is_of_quantizer(node):
                if not is_constant(node.inputs[0]):
                    inputs[node] = None
                continue
            operators[node] = None
            pending += node.inputs
        return cls(quantize, tuple(operators), tuple(inputs))

    @property
    def bits(self) -> int:
        """The width of the codes."""
        return int(element_type(self.quantize).bitwidth)

    def has(self, kinds: Iterable[str]) -> bool:
        """Return True if an operator is of one of these kinds."""
        return any(node.op_type in kinds for node in self.operators)

    @property
    def scales(self) -> list[float]:
        """The scales of all codes of one scale, those of the result the last."""
        nodes = (*self.inputs, self.quantize)
        return [scale for node in nodes for scale in scales_of(node)[:1]]

    def multiplies_activations(self) -> bool:
        """Return True if a matrix product has no stored factor."""
        return any(
            node.op_type in _PRODUCTS and not _reads_stored(node)
            for node in self.operators
        )

    def in_float(self) -> bool:
        """Return True if anything but layers, sums and moves is among the operators."""
        return self.has(_IN_FLOAT)

    def averages_apart(self) -> bool:
        """Return True for averages over windows of 4 and more that do not overlap."""
        windows = [
            (
                list(attribute(node, "kernel_shape", ())),
                list(attribute(node, "strides", ())),
            )
            for node in self.operators
            if node.op_type == "AveragePool"
        ]
        return any(size == steps and max(size) >= 4 for size, steps in windows)

    def adds_at_ties(self) -> bool:
        """Return True for a sum where one scale is twice another: values lie between two codes."""
        scales = self.scales
        ratios = (first / second for first in scales for second in scales if second)
        return self.has(_SUMS) and any(abs(ratio - 2) < 2 * _NEAR for ratio in ratios)


def _is_of_quantizer(dequantize: Node) -> bool:
    """Return True unless a pass inserted the pair, whose codes are those of a result behind."""
    return is_constant(dequantize.inputs[0]) or str(dequantize.name).endswith(
        "/DequantizeLinear"
    )


def _reads_stored(node: Node) -> bool:
    """Return True if the second factor of a layer is stored in the file."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    while value is not None and not is_constant(value):
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.inputs else None
        if producer is None or producer.op_type not in _STORED_THROUGH:
            return False
    return value is not None


@dataclass(frozen=True)
class Row:
    """A row of the table: what it is about, and how far codes may be off.

    Attributes:
        what: in words.
        holds: tells whether it is about codes.
        share: how many of the codes may be other ones.
        steps: by how much.
    """

    what: str
    holds: Callable[[Between], bool]
    share: float
    steps: int


#: The rows that hold give the bound together: the largest share, and the most steps.
BOUNDS = (
    Row("any codes of 8 bits", lambda x: True, 0.05, 1),
    Row("sums where one scale is twice another", Between.adds_at_ties, 0.25, 1),
    Row("products of two activations", Between.multiplies_activations, 0.13, 1),
    Row("recurrent layers, in float16", lambda x: x.has(_RECURRENT), 0.6, 1),
    Row("averages over windows", lambda x: x.has(("AveragePool",)), 0.10, 1),
    Row(
        "averages over windows side by side, 4 and more wide",
        Between.averages_apart,
        0.25,
        1,
    ),
    Row("softmax", lambda x: x.has(("Softmax",)), 0.15, 2),
    Row("16 bits, in layers with weights", lambda x: x.bits == 16, 1.0, 28),
    # Float16 has 11 bits: one rounding of it is up to 16 of 65,536 codes.
    Row(
        "16 bits, computed in float", lambda x: x.bits == 16 and x.in_float(), 1.0, 128
    ),
    Row(
        "16 bits, products",
        lambda x: x.bits == 16 and x.multiplies_activations(),
        1.0,
        512,
    ),
)
#: The same for the chips before v73, where there is no other row.
OLD_SHARE = 0.10


def bound_of(quantize: Node, *, is_old: bool) -> LayerBound:
    """Return how far the codes of a QuantizeLinear may be off on a chip."""
    between = Between.of(quantize)
    rows = [row for row in BOUNDS if row.holds(between)]
    least = OLD_SHARE if is_old else 0.0
    return LayerBound(
        max(least, *(row.share for row in rows), 0.0),
        max(row.steps for row in rows),
    )
