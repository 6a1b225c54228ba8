"""Which nodes of a file ONNX Runtime runs on integers, and why the others stay float."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchq.onnx.ir import Graph, load_graph
from torchq.onnx.verify.metrics import table
from torchq.onnx.verify.session import Session

__all__ = ["InspectReport", "NodePlacement", "inspect_onnx"]

#: Operators that compute on integers in ONNX Runtime; everything that starts with QLinear does too.
_INTEGER = frozenset(
    [
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "ConvInteger",
        "QGemm",
        "MatMulNBits",
        "QAttention",
    ]
)
#: Operators that only move data: on integers where their input is.
_MOVES = frozenset(
    [
        "MaxPool",
        "Reshape",
        "Transpose",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Resize",
        "Slice",
        "Gather",
        "Split",
        "Concat",
    ]
)
#: Float operators worth naming. True: ONNX Runtime has an integer kernel for it.
_COMPUTES = {
    **dict.fromkeys(
        [
            "Conv",
            "FusedConv",
            "Gemm",
            "FusedGemm",
            "MatMul",
            "FusedMatMul",
            "Add",
            "Mul",
            "AveragePool",
            "GlobalAveragePool",
        ],
        True,
    ),
    **dict.fromkeys(["LeakyRelu", "Sigmoid", "Softmax", "Concat", "MaxPool", "Resize"], True),
    **dict.fromkeys(
        [
            "ConvTranspose",
            "Sub",
            "Div",
            "HardSwish",
            "HardSigmoid",
            "Gelu",
            "FastGelu",
            "BiasGelu",
            "Erf",
            "Tanh",
            "Elu",
        ],
        False,
    ),
    **dict.fromkeys(
        [
            "LayerNormalization",
            "SkipLayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "BatchNormalization",
        ],
        False,
    ),
    **dict.fromkeys(
        [
            "ReduceMean",
            "Pad",
            "LSTM",
            "GRU",
            "PRelu",
            "Pow",
            "Sqrt",
            "Attention",
            "MultiHeadAttention",
        ],
        False,
    ),
}
_PLAIN_NAMES = {"FusedConv": "Conv", "FusedGemm": "Gemm", "FusedMatMul": "MatMul"}
#: Which input of a kernel holds the weight.
_WEIGHTS = {"QLinearConv": 3, "QGemm": 3, "QLinearMatMul": 3, "MatMulIntegerToFloat": 1}
_INTEGER_TYPES = frozenset([2, 3, 4, 5, 21, 22])


@dataclass(frozen=True)
class NodePlacement:
    """One computing node of the optimised graph.

    Attributes:
        name, kind: of the node.
        integer: whether it runs on integers.
        reason: why not, and what would change that; empty for integer nodes.
    """

    name: str
    kind: str
    integer: bool
    reason: str = ""


@dataclass(frozen=True)
class InspectReport:
    """What :func:`torchq.inspect_onnx` found; ``print`` it.

    Attributes:
        path: the file.
        nodes: every computing node of the optimised graph, in order.
        counts: operator -> number, of all nodes of the optimised graph.
        wide: names of the integer nodes whose weights need 8 bits. Two products of such a weight with a uint8 overflow 16 bits, in which
            x86 CPUs without VNNI or AMX add them; with 7 bits (``recipes.int8(reduce_range=True)``) they do not.
    """

    path: str
    nodes: tuple[NodePlacement, ...]
    counts: dict[str, int]
    wide: tuple[str, ...] = ()

    @property
    def integer(self) -> tuple[NodePlacement, ...]:
        """The nodes that run on integers."""
        return tuple(node for node in self.nodes if node.integer)

    @property
    def fallbacks(self) -> tuple[NodePlacement, ...]:
        """The nodes that run in float."""
        return tuple(node for node in self.nodes if not node.integer)

    def __str__(self) -> str:
        kinds = Counter(node.kind for node in self.integer)
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
        lines = [
            f"{self.path}: {len(self.integer)} of {len(self.nodes)} computing nodes run on integers: {done}"
        ]
        if self.wide:
            lines.append(
                f"{len(self.wide)} of them have 8-bit weights, whose sums can overflow on x86 CPUs without VNNI or AMX; "
                "for those use torchq.recipes.int8(reduce_range=True)"
            )
        if self.fallbacks:
            lines += table(
                [
                    ("in float", "type", "why"),
                    *((node.name, node.kind, node.reason) for node in self.fallbacks),
                ]
            )
        return "\n".join(lines)


def inspect_onnx(path: str | os.PathLike[str]) -> InspectReport:
    """Let ONNX Runtime optimise a file for this CPU and say what it made of it.

    Args:
        path: any ONNX file that ONNX Runtime can load.

    Raises:
        ExportError: it cannot load the file.
        MissingExtraError: onnx or onnxruntime is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder, "optimized.onnx")
        Session(os.fspath(path), optimize=True, save_optimized=optimized)
        graph = load_graph(optimized)
    counts = dict(Counter(node.op_type for node in graph.nodes))
    wide = tuple(
        node.name or node.output[0]
        for node in graph.of(*_WEIGHTS)
        if _is_wide(graph, node.input[_WEIGHTS[node.op_type]])
    )
    return InspectReport(os.fspath(path), tuple(_placements(graph)), counts, wide)


def _is_wide(graph: Graph, weight: str) -> bool:
    """Whether a stored weight has int8 codes beyond 7 bits: 2 * 255 * 64 still fits 16 bits."""
    return (
        weight in graph.initializers
        and graph.initializers[weight].data_type == 3
        and bool((graph.value(weight).int().abs() > 64).any())
    )


def _placements(graph: Graph) -> list[NodePlacement]:
    found = []
    for node in graph.nodes:
        kind = _PLAIN_NAMES.get(node.op_type, node.op_type)
        name = node.name or node.output[0]
        if (
            kind.startswith("QLinear")
            or kind in _INTEGER
            or (kind in _MOVES and _on_integers(graph, node.input[0]))
        ):
            found.append(NodePlacement(name, kind, True))
        elif kind in _COMPUTES and _matters(graph, node, kind):
            found.append(NodePlacement(name, kind, False, _reason(graph, node, kind)))
    return found


def _on_integers(graph: Graph, value: str) -> bool:
    """Whether ``value`` holds codes."""
    node = graph.producer(value)
    if node is None:
        return value in graph.initializers and graph.initializers[value].data_type in _INTEGER_TYPES
    if node.op_type in _MOVES:
        return _on_integers(graph, node.input[0])
    return node.op_type == "QuantizeLinear" or (
        node.op_type.startswith("QLinear") or _quantized_gemm(node)
    )


def _quantized_gemm(node: Any) -> bool:
    return node.op_type == "QGemm" and len(node.input) > 8


def _matters(graph: Graph, node: Any, kind: str) -> bool:
    """Arithmetic on constants or on shapes, biases and factors, and data movement in a float model, are not worth a line."""
    if kind in _MOVES:
        return any(_dequantized(graph, value) for value in node.input[:1])
    if kind in ("Add", "Mul") and any(_is_shape(graph, value) for value in node.input):
        return False
    return not all(_is_shape(graph, value) for value in node.input if value)


def _is_shape(graph: Graph, value: str, depth: int = 32) -> bool:
    """Whether ``value`` follows from constants and from shapes of tensors alone."""
    node = graph.producer(value)
    if node is None:
        return value in graph.initializers
    if node.op_type in ("Shape", "Size") or depth == 0:
        return True
    return all(_is_shape(graph, source, depth - 1) for source in node.input if source)


def _dequantized(graph: Graph, value: str) -> bool:
    node = graph.producer(value)
    return node is not None and node.op_type == "DequantizeLinear"


def _reason(graph: Graph, node: Any, kind: str) -> str:
    """Why ONNX Runtime left a node in float."""
    if not _COMPUTES[kind]:
        return f"ONNX Runtime has no integer {kind}; its quantizers only cost time"
    floats = [value for value in node.input[:2] if value and not _dequantized(graph, value)]
    if floats:
        return f"input {floats[0]} is not quantized; put a quantizer there (quantize_(..., target='onnxruntime', example=...))"
    if kind == "Gemm":
        return "ONNX Runtime has no Gemm from integers to float; torchq.onnx.retarget_onnx(..., 'onnxruntime') makes it MatMul and Add"
    if node.op_type == "FusedConv" or any(
        reader.op_type in ("Relu", "Clip") for reader in graph.readers(node.output[0])
    ):
        return "the activation after it keeps a signed quantizer away; export with target='onnxruntime' for uint8 there"
    if not all(
        reader.op_type == "QuantizeLinear" for reader in graph.readers(node.output[0])
    ) or graph.is_output(node.output[0]):
        return "its output is not quantized; put a quantizer there (quantize_(..., target='onnxruntime', example=...))"
    return "ONNX Runtime has no kernel for this combination of types, scales or attributes"
