"""Which nodes of a file ONNX Runtime runs on integers, and why the others stay float."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torchq.errors import ExportError
from torchq.onnx.coverage import Coverage
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    computed_by,
    data_type,
    float_size,
    is_constant,
    is_output,
    load_model,
    named_errors,
    names,
    nodes_of,
    readers,
    stored_size,
    value_of,
)
from torchq.onnx.qdq import read_record, starts_at_zero
from torchq.runtime import RUNTIMES, Runtime, runtime_of
from torchq.runtimes.checks import (
    layers_in_front_of_norms,
    norms_text,
)
from torchq.runtimes.onnxruntime.rules import IN_FLOAT, IN_FLOAT_FOR_NORMS
from torchq.runtimes.onnxruntime.session import Session
from torchq.utils.text import table, wrap

_THIS = "onnxruntime"
#: Operators that compute on integers in ONNX Runtime, beside all that start with "QLinear".
_INTEGER = names(
    "MatMulIntegerToFloat DynamicQuantizeMatMul MatMulInteger ConvInteger QGemm MatMulNBits "
    "QAttention"
)
#: Operators that only move data: they run on integers where their input is.
_MOVES = names(
    "MaxPool Reshape Transpose Flatten Squeeze Unsqueeze Resize Slice Gather Split Concat"
)
#: Float operators worth a line, for which ONNX Runtime has an integer kernel.
_HAS_KERNEL = names(
    "Conv Gemm MatMul Add Mul AveragePool GlobalAveragePool LeakyRelu Sigmoid Softmax Concat "
    "MaxPool Resize"
)
#: Float operators worth a line, for which it has none.
_NO_KERNEL = names(
    "ConvTranspose Sub Div HardSwish HardSigmoid Gelu FastGelu BiasGelu Erf Tanh Elu "
    "LayerNormalization SkipLayerNormalization InstanceNormalization GroupNormalization "
    "BatchNormalization ReduceMean Pad LSTM GRU PRelu Pow Sqrt Attention MultiHeadAttention"
)
_FUSED = {"FusedConv": "Conv", "FusedGemm": "Gemm", "FusedMatMul": "MatMul"}
#: What recurrent layers compute between the products of a step, and how they take it apart.
_BETWEEN = names("Add Mul Sub Sigmoid Tanh Relu")
_SPLITS = names("Split Slice Squeeze Unsqueeze")
_OF_HIDDEN_STATE = re.compile(r"(^|\.)(hidden|projected)_\w*quantizer/scale$")
_IN_STEP = "in the steps of a recurrent layer the products alone are quantized"
#: The index of the input with the weight, by integer operator.
_WEIGHTS = {"QLinearConv": 3, "QGemm": 3, "QLinearMatMul": 3, "MatMulIntegerToFloat": 1}
#: QGemm returns codes if it has the parameters of its output, inputs 7 and 8.
_QGEMM_INPUTS = 8
_FLOAT = "quantize the model and export it again, or the file itself: torchq quantize"
_PLACE = "quantize_(..., target='onnxruntime', example=...), or a rule with its path"
#: The same for a file of a model that was quantized for this runtime.
_PLACE_MORE = "a rule with its path"


@dataclass(frozen=True)
class NodePlacement:
    """One computing node of the optimised graph.

    Attributes:
        name: Name of the node.
        kind: Its operator.
        integer: True if it runs on integers.
        reason: Why it does not, and what would change that; empty for integer nodes.
    """

    name: str
    kind: str
    integer: bool
    reason: str = ""


@dataclass(frozen=True)
class InspectReport:
    """What :func:`torchq.inspect_onnx` found; ``print`` it.

    Attributes:
        path: The file.
        nodes: Every computing node of the optimised graph, in order; none of a file for another
            runtime that ONNX Runtime cannot optimise.
        counts: Operator -> number, of all nodes of the optimised graph.
        wide: Names of the integer nodes whose weights need 8 bits. Two products of such a weight
            and a uint8 code overflow the 16 bits in which x86 CPUs without VNNI or AMX add them;
            with 7 bits (``recipes.int8(reduce_range=True)``) they do not.
        norms: Names of quantized layers in float, as a BatchNorm behind them is not folded.
        coverage: How much of the file as it is written reads integers.
        size: Bytes of the file's tensors, and those of the same tensors in float32.
        target: The runtime that the file is for, as the call or else the file says.
    """

    path: str
    nodes: tuple[NodePlacement, ...]
    counts: dict[str, int]
    wide: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    coverage: Coverage | None = None
    size: tuple[int, int] = (0, 0)
    target: str = ""

    @property
    def is_for_another(self) -> bool:
        """True for a file for another runtime, which runs other nodes on integers."""
        return self.target not in ("", _THIS)

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
        done = (
            ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            or "none"
        )
        counts = f"{len(self.integer)} of {len(self.nodes)} computing nodes"
        verdict = f"{counts} run on integers: {done}"
        if self.is_for_another:
            here = f"in ONNX Runtime {verdict}"
            if not self.nodes:
                here = "ONNX Runtime cannot optimise it"
            verdict = f"a file for {self.target}; {here}"
        lines = [f"{self.path}: {verdict}"]
        stored, as_float = self.size
        if self.coverage is not None and as_float:
            lines.append(
                f"as written, {self.coverage}; tensors have {stored / as_float:.0%} of their size "
                "in float32"
            )
            if not self.coverage.on_integers and not self.integer:
                lines.append(
                    f"this file computes in float: {self.coverage.reason or _FLOAT}"
                )
        if self.norms:
            lines.append(norms_text(self.norms, IN_FLOAT))
        if self.wide:
            lines.append(
                f"{len(self.wide)} of them have 8-bit weights, whose sums can overflow on x86 CPUs "
                "without VNNI or AMX; there set session.x64quantprecision to '1' in sessions, or "
                "use torchq.recipes.int8(reduce_range=True)"
            )
        paragraphs = [wrap(line) for line in lines]
        if self.fallbacks and self.integer and not self.is_for_another:
            paragraphs.append(self._kinds())
        return "\n".join(paragraphs)

    def _kinds(self) -> str:
        """Return a row for each operator that stays in float, with the reason of the first one."""
        groups: dict[str, list[NodePlacement]] = {}
        for node in self.fallbacks:
            groups.setdefault(node.kind, []).append(node)
        rows = [
            (kind, str(len(nodes)), nodes[0].name, nodes[0].reason)
            for kind, nodes in groups.items()
        ]
        text = table([("in float", "nodes", "the first", "why"), *rows])
        if len(self.fallbacks) > len(groups):
            text += "\nprint(report.table()) has all of them"
        return text

    def table(self) -> str:
        """Return a row for each node that runs in float."""
        rows = [(node.name, node.kind, node.reason) for node in self.fallbacks]
        return table([("in float", "type", "why"), *rows])


def inspect_onnx(
    path: str | os.PathLike[str], *, target: str | Runtime | None = None
) -> InspectReport:
    """Let ONNX Runtime optimise a file for this CPU, and report which nodes run on integers.

    Args:
        path: Any ONNX file that ONNX Runtime can load.
        target: The runtime that the file is for: ``report.coverage`` is by its rule. None takes the
            one that the file says, which those of other tools do not.

    Returns:
        The computing nodes; ``print`` it, or ask ``report.fallbacks``.

    Raises:
        ConfigError: There is no such target.
        ExportError: ONNX Runtime cannot load the file, and it is for no other runtime.
        MissingExtraError: A package of the extra "export" is not installed.

    Example:
        >>> torchq.inspect_onnx("model.onnx").fallbacks  # doctest: +SKIP
        ()
    """
    runtime = runtime_of(target)
    written = load_model(path)  # It says what is wrong with a broken file.
    recorded = str(read_record(written).get("target") or "")
    name = recorded if runtime is None else runtime.name
    model = _optimized(path, is_for_another=name not in ("", _THIS))
    with named_errors(path):
        counts: dict[str, int] = {}
        wide: tuple[str, ...] = ()
        placements: tuple[NodePlacement, ...] = ()
        if model is not None:
            counts = dict(Counter(node.op_type for node in model.graph))
            wide = tuple(
                _name(node)
                for node in nodes_of(model, *_WEIGHTS)
                if _is_wide(node.inputs[_WEIGHTS[node.op_type]])
            )
            place = _PLACE_MORE if name == _THIS else _PLACE
            placements = tuple(_placements(model, place))
        norms = tuple(layers_in_front_of_norms(written, IN_FLOAT_FOR_NORMS))
        coverage = Coverage.of(written, runtime or RUNTIMES.get(recorded))
        size = (stored_size(written), float_size(written))
    return InspectReport(
        os.fspath(path), placements, counts, wide, norms, coverage, size, name
    )


def _optimized(path: str | os.PathLike[str], *, is_for_another: bool) -> Model | None:
    """Return a file as ONNX Runtime optimises it.

    None for one that is for another runtime where ONNX Runtime cannot do that: it has no kernel for
    concatenated codes with scales in float16.
    """
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder, "optimized.onnx")
        try:
            Session(
                os.fspath(path),
                optimize=True,
                save_optimized=optimized,
                exact_products=False,
            )
        except ExportError:
            if not is_for_another:
                raise
            return None
        return load_model(optimized, check=False)


def _name(node: Node) -> str:
    return str(node.name or node.outputs[0].name)


def _is_wide(weight: Value) -> bool:
    """Return True for int8 codes beyond 7 bits: 2 * 255 * 64 still fits 16 bits."""
    if not is_constant(weight) or data_type(weight).name != "INT8":
        return False
    return bool((value_of(weight).int().abs() > 64).any())


def _placements(model: Model, place: str) -> list[NodePlacement]:
    placements = []
    codes, shapes = _values_of_codes(model), _values_of_shapes(model)
    steps = _values_of_steps(model)
    for node in model.graph:
        kind = _FUSED.get(node.op_type, node.op_type)
        moves_codes = kind in _MOVES and node.inputs[0] in codes
        if kind.startswith("QLinear") or kind in _INTEGER or moves_codes:
            placements.append(NodePlacement(_name(node), kind, True))
        elif kind in _NO_KERNEL | _HAS_KERNEL and _matters(node, kind, shapes):
            in_step = kind in _BETWEEN and not steps.isdisjoint(node.inputs)
            reason = _IN_STEP if in_step else _reason(node, kind, place)
            placements.append(NodePlacement(_name(node), kind, False, reason))
    return placements


def _values_of_steps(model: Model) -> set[Value]:
    """Return what recurrent layers compute between the products of their steps."""
    found: set[Value] = set()
    for node in model.graph:
        names_of_inputs = [v.name or "" for v in node.inputs if v is not None]
        is_product = not node.op_type.endswith("QuantizeLinear") and any(
            _OF_HIDDEN_STATE.search(name) for name in names_of_inputs
        )
        is_between = node.op_type in _BETWEEN | _SPLITS
        if is_product or (is_between and not found.isdisjoint(node.inputs)):
            found.update(node.outputs)
    return found


def _values_of_codes(model: Model) -> set[Value]:
    """Return the values that hold integer codes."""
    codes = {v for v in model.graph.initializers.values() if _is_code_type(v)}
    for node in model.graph:
        kind = node.op_type
        if (
            kind == "QuantizeLinear"
            or kind.startswith("QLinear")
            or (kind == "QGemm" and len(node.inputs) > _QGEMM_INPUTS)
            or (kind in _MOVES and node.inputs[0] in codes)
        ):
            codes.update(node.outputs)
    return codes


def _is_code_type(value: Value) -> bool:
    dtype = data_type(value)
    return bool(dtype.is_integer()) and dtype.bitwidth <= 16


def _values_of_shapes(model: Model) -> set[Value]:
    """Return the values that follow from stored tensors and from shapes of tensors alone."""
    shapes = set(model.graph.initializers.values())
    for node in model.graph:
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type in ("Shape", "Size") or all(
            value in shapes for value in inputs
        ):
            shapes.update(node.outputs)
    return shapes


def _matters(node: Node, kind: str, shapes: set[Value]) -> bool:
    """Return False for arithmetic on constants or shapes, and for data movement in float."""
    if kind in _MOVES:
        return _is_dequantized(node.inputs[0])
    inputs = [value for value in node.inputs if value is not None]
    if kind in ("Add", "Mul") and any(value in shapes for value in inputs):
        return False  # A bias or a factor.
    return not all(value in shapes for value in inputs)


def _is_dequantized(value: Value) -> bool:
    return computed_by(value, "DequantizeLinear") is not None


def _reason(node: Node, kind: str, place: str) -> str:
    """Return why ONNX Runtime left a node in float, as the graph shows it.

    ``place`` says how a quantizer gets where there is none.
    """
    inputs = [value for value in node.inputs[:2] if value is not None]
    if kind in _NO_KERNEL:
        wasted = any(
            _is_dequantized(v) and not is_constant(v.producer().inputs[0])
            for v in inputs
        )
        cost = "; the quantizers in front of it only cost time" if wasted else ""
        return f"ONNX Runtime has no integer {kind}{cost}"
    for value in inputs:
        if is_constant(value):
            return f"its weight {value.name} is stored in float"
        if not _is_dequantized(value):
            return (
                f"input {value.name} is not quantized; put a quantizer there ({place})"
            )
    if kind == "Gemm":
        return (
            "ONNX Runtime has no Gemm from integers to float; "
            "torchq.export_onnx(..., target='onnxruntime') writes MatMul and Add"
        )
    return _output_reason(node, place)


def _output_reason(node: Node, place: str) -> str:
    """Return why a node with quantized operands has no integer kernel: what follows it."""
    value = node.outputs[0]
    activation = node.op_type == "FusedConv"
    users = readers(value)
    while (
        len(users) == 1
        and users[0].op_type in ("Relu", "Clip")
        and not is_output(value)
    ):
        value = users[0].outputs[0]
        activation = True
        users = readers(value)
    others = sorted(
        {user.op_type for user in users if user.op_type != "QuantizeLinear"}
    )
    if is_output(value):
        others.append("the model's output")
    if others or not users:
        return (
            f"its output is not quantized for {', '.join(others)}; put a quantizer there "
            f"({place}, or torchq.nn.QuantIdentity() behind it)"
        )
    if activation and not all(starts_at_zero(user) for user in users):
        return (
            "the codes after its activation are signed; export with target='onnxruntime' for uint8 "
            "there, unless they share a range with a tensor that can be negative"
        )
    return (
        "ONNX Runtime has no kernel for this combination of types, scales or attributes"
    )
