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
from torchq.runtimes.qnn.convolutions import averaged

_SUMS = names("Add Sub")
#: What may stand between a stored weight and its layer.
_STORED_THROUGH = names("DequantizeLinear Transpose Cast Reshape")
_PRODUCTS = names("MatMul Gemm")
_IN_FLOAT = names(
    "Div Elu Erf Exp GRU Gelu GroupNormalization HardSigmoid HardSwish InstanceNormalization LSTM "
    "LayerNormalization Log LogSoftmax Mul PRelu Pow ReduceMean Selu Sigmoid Softplus Sqrt Tanh"
)
_WIDE = 16
#: A mean is a tie if it lies in the middle of two codes: an odd number of these parts of a code.
_PARTS = range(2, 17, 2)
#: It is one for the emulator if it lies within this of the middle, for a mean of some 100 codes.
_AT_TIES = 0.002
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

    def interpolates(self) -> bool:
        """Return True if images are resized, and not by copies of their places."""
        modes = [
            str(attribute(node, "mode", "nearest"))
            for node in self.operators
            if node.op_type == "Resize"
        ]
        return any(mode != "nearest" for mode in modes)

    def averages_at_ties(self) -> bool:
        """Return True for an average where the scales let values lie between two codes."""
        places = max(map(averaged, self.operators), default=0)
        if not places or len(self.scales) != 2:
            return False
        of_input, of_result = self.scales
        steps = of_input / of_result / places
        return any(_is_odd(steps * parts) for parts in _PARTS)

    def adds_at_ties(self) -> bool:
        """Return True for a sum where one scale is twice another: values lie between two codes."""
        scales = self.scales
        ratios = (first / second for first in scales for second in scales if second)
        return self.has(_SUMS) and any(abs(ratio - 2) < 2 * _NEAR for ratio in ratios)


def _is_odd(number: float) -> bool:
    """Return True for a number that is nearly odd."""
    nearest = round(number)
    return bool(nearest % 2) and abs(number - nearest) < _AT_TIES * nearest


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
        reason: why it is a row of its own, with the most that was seen; empty for those that no
            measurement went beyond.
    """

    what: str
    holds: Callable[[Between], bool]
    share: float
    steps: int
    reason: str = ""


#: The rows that hold give the bound together: the largest share, and the most steps.
BOUNDS = (
    Row("any codes of 8 bits", lambda x: True, 0.05, 1),
    Row("sums where one scale is twice another", Between.adds_at_ties, 0.25, 1),
    Row("products of two activations", Between.multiplies_activations, 0.13, 1),
    Row("softmax", lambda x: x.has(("Softmax",)), 0.15, 2),
    Row("16 bits, in layers with weights", lambda x: x.bits == _WIDE, 1.0, 28),
    Row(
        "averages that lie between two codes",
        Between.averages_at_ties,
        0.30,
        1,
        "means of 2 x 2 codes on the grid of their results are ties in one case of four, on twice "
        "as coarse a grid in one of two: seen 24 %",
    ),
    Row(
        "GRU",
        lambda x: x.has(("GRU",)),
        0.60,
        1,
        "the state goes from step to step without codes: seen 50 % of 12 steps, 3 % of one",
    ),
    Row(
        "LSTM",
        lambda x: x.has(("LSTM",)),
        0.80,
        2,
        "the emulator's own arithmetic, in a single step too: seen 69 % by 2",
    ),
    Row(
        "16 bits, computed in float",
        lambda x: x.bits == _WIDE and x.has(_IN_FLOAT),
        1.0,
        64,
        "float16 has 11 bits, so one rounding is up to 16 codes: seen 59 of a GELU",
    ),
    Row(
        "16 bits, softmax",
        lambda x: x.bits == _WIDE and x.has(("Softmax",)),
        1.0,
        192,
        "the emulator's own arithmetic, where the largest value is far below 1: seen 178",
    ),
    Row(
        "16 bits, softplus",
        lambda x: x.bits == _WIDE and x.has(("Softplus",)),
        1.0,
        640,
        "the emulator's own arithmetic, in Mish too: seen 572",
    ),
    Row(
        "16 bits, images resized by interpolation",
        lambda x: x.bits == _WIDE and x.interpolates(),
        1.0,
        128,
        "the emulator's own arithmetic: seen 96",
    ),
    Row(
        "16 bits, products of two activations",
        lambda x: x.bits == _WIDE and x.multiplies_activations(),
        1.0,
        400,
        "the emulator's own arithmetic, whatever the zero points: seen 338; 3 where the second "
        "factor has 8 bits",
    ),
)
#: The same for the chips before v73, where there is no other row: 8 bits, and 16, which were seen
#: off by 33.
OLD_SHARE = 0.10
OLD_STEPS = 40


def bound_of(quantize: Node, *, is_old: bool) -> LayerBound:
    """Return how far the codes of a QuantizeLinear may be off on a chip."""
    between = Between.of(quantize)
    rows = [row for row in BOUNDS if row.holds(between)]
    share = max(row.share for row in rows)
    steps = max(row.steps for row in rows)
    if is_old:
        share = max(share, OLD_SHARE)
        steps = max(steps, OLD_STEPS) if between.bits == _WIDE else steps
    return LayerBound(share, steps)
