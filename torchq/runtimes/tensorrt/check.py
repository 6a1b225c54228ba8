"""A proof that a file is strongly typed as TensorRT 10 and 11 want it, from the file alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from torchq.errors import ExportError
from torchq.formats import SCALE_TYPES
from torchq.onnx.ir import (
    DataType,
    Model,
    Node,
    Value,
    computed_by,
    data_type,
    input_at,
    is_constant,
    is_output,
    load_model,
    nodes_of,
    opset_of,
    readers,
    value_of,
)
from torchq.onnx.passes.constants import known_types
from torchq.onnx.qdq import pair_name, read_record
from torchq.runtimes.checks import LAYERS
from torchq.runtimes.tensorrt.rules import check_residual_adds
from torchq.runtimes.tensorrt.typed import formal_of, schema_of
from torchq.utils import bullets, short_repr

NOT_RUN = "not run: TensorRT's parser, its builder, any GPU. Nothing is known of speed."
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")


@dataclass(frozen=True)
class FileCheck:
    """What :func:`check_file` found; ``print`` it.

    Attributes:
        path: The file.
        precision: Its float type.
        problems: Sentences that each name a node and what is wrong.
        kept: Node that stays in float32 -> the reason that the export gave.
        counts: How many pairs, casts and float nodes were looked at.
        not_run: What this does not prove.
    """

    path: str
    precision: str
    problems: tuple[str, ...]
    kept: dict[str, str]
    counts: str
    not_run: str = NOT_RUN

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        verdict = (
            f"strongly typed {self.precision}"
            if self.ok
            else f"{len(self.problems)} PROBLEMS"
        )
        lines = [
            f"{self.path}: {verdict}; {self.counts}, {len(self.kept)} kept in float32"
        ]
        if self.problems:
            lines.append(bullets(self.problems))
        return "\n".join([*lines, self.not_run])


def check_file(path: str | os.PathLike[str]) -> FileCheck:
    """Prove that a file of ``export_onnx(target="tensorrt")`` is strongly typed, or say where not.

    It reads the file alone: every operator has inputs of one type where the standard wants it, no
    Cast stands between a DequantizeLinear and its layer or between two nodes in float32, scales
    have the type of their neighbours and are normal numbers of it, both scales of a pair are equal,
    no stored number overflows, and an addition to the result of a layer has a pair on its other
    operand.

    Args:
        path: The file.

    Returns:
        The problems, and what was not run.

    Raises:
        ExportError: The file is broken, or was not written for TensorRT.
        MissingExtraError: A package of the extra "export" is not installed.
    """
    model = load_model(path)
    problem = _damage(read_record(model))
    if problem:
        raise ExportError(
            f"{path}: its record has {problem}. The file is damaged: export it again"
        )
    precision = _precision(model)
    if precision is None:
        raise ExportError(
            f"{path}: was not written for TensorRT; expected a file of "
            "torchq.export_onnx(..., target='tensorrt')"
        )
    problems = (*check_typing(model), *check_residual_adds(model))
    kinds = ("QuantizeLinear", "DequantizeLinear", "Cast")
    counts = ", ".join(f"{len(nodes_of(model, kind))} {kind}" for kind in kinds)
    reason_by_node = dict(read_record(model).get("kept", {}))
    return FileCheck(os.fspath(path), precision, problems, reason_by_node, counts)


def _damage(record: Mapping[str, object]) -> str:
    """Return what no export writes into a record; "" where nothing is wrong."""
    precision = record.get("precision", "float32")
    if precision not in (*SCALE_TYPES, "float32"):
        allowed = ", ".join((*SCALE_TYPES, "float32"))
        return f"the precision {precision!r}; expected one of {allowed}"
    reasons = record.get("kept", {})
    infinite = record.get("infinite", [])
    texts = [*reasons, *reasons.values()] if isinstance(reasons, dict) else [None]
    if not all(isinstance(entry, str) for entry in texts):
        return f"kept={short_repr(reasons)}; expected reasons by the names of nodes"
    if not (
        isinstance(infinite, list) and all(isinstance(name, str) for name in infinite)
    ):
        return f"infinite={short_repr(infinite)}; expected names of tensors"
    return ""


def _precision(model: Model) -> str | None:
    """Return the float type of a file for TensorRT; those of float32 record none."""
    record = read_record(model)
    return record.get(
        "precision", "float32" if record.get("target") == "tensorrt" else None
    )


def check_typing(model: Model) -> Iterator[str]:
    """Yield what keeps a file for TensorRT from being strongly typed."""
    precision = _precision(model)
    if precision is not None:
        types = _Types(model, precision, read_record(model))
        yield from types.mixed()
        yield from types.casts()
        yield from types.scales()
        yield from types.numbers()


class _Types:
    """The types of the values of a graph, and what is wrong with them."""

    def __init__(self, model: Model, precision: str, record: dict[str, object]) -> None:
        self.model = model
        self.own = precision.upper().removesuffix("32")
        self.types: dict[str, DataType] = known_types(model)
        self.kept = set(record.get("kept", ()))  # type: ignore[call-overload]
        self.infinite = set(record.get("infinite", ()))  # type: ignore[call-overload]

    def _type(self, value: Value | None) -> str:
        """Return the name of a float type; "" for others."""
        dtype = None if value is None else self.types.get(value.name)
        return dtype.name if dtype is not None and dtype.name in _FLOATS else ""

    def mixed(self) -> Iterator[str]:
        """Yield operators whose inputs have several float types, or one without a reason."""
        for node in self.model.graph:
            schema = schema_of(node, opset_of(self.model))
            groups: dict[str, set[str]] = {}
            for index, value in enumerate(node.inputs if schema else ()):
                formal = formal_of(schema, index, False)
                if self._type(value) and formal is not None:
                    groups.setdefault(formal.type_str, set()).add(self._type(value))
            mixed = next(
                (sorted(types) for types in groups.values() if len(types) > 1), None
            )
            if mixed:
                yield f"{node.name}: reads {' and '.join(mixed)}; {node.op_type} takes one type"
            elif self._is_long(node) and node.name not in self.kept:
                yield f"{node.name}: computes in FLOAT, and the record of the file has no reason"

    def _is_long(self, node: Node) -> bool:
        """Return True for a node in float32 among others, which is no pair and no Cast."""
        if self.own == "FLOAT" or node.op_type in (
            "QuantizeLinear",
            "DequantizeLinear",
            "Cast",
        ):
            return False
        return any(self._type(value) == "FLOAT" for value in node.outputs)

    def casts(self) -> Iterator[str]:
        """Yield casts between float types that stand elsewhere than at a border."""
        for node in nodes_of(self.model, "Cast"):
            source = node.inputs[0]
            result = node.outputs[0]
            if not (self._type(source) and self._type(result)):
                continue
            name = f"{node.name}: a Cast"
            before, users = computed_by(source), readers(result)
            if computed_by(source, "DequantizeLinear") is not None:
                yield f"{name} stands between a DequantizeLinear and {_named(users)}"
            elif is_constant(source):
                yield f"{name} reads a stored tensor; store it in the type"
            elif self._type(source) == self._type(result):
                # Files that are float32 throughout have those of torch's exporter.
                if self.own != "FLOAT":
                    yield f"{name} changes nothing"
            elif self._type(result) == "FLOAT":
                if not is_output(result) and not all(map(self._is_kept, users)):
                    yield f"{name} to float32 in front of {_named(users)}, which is not kept"
            elif before is not None and not self._is_kept(before):
                yield f"{name} from float32 behind {before.name}, which is not kept"
            elif before is not None and any(map(self._is_kept, _behind_casts(users))):
                yield f"{name} stands between two nodes in float32"

    def _is_kept(self, node: Node) -> bool:
        return node.name in self.kept

    def scales(self) -> Iterator[str]:
        """Yield pairs whose scales have another type or value than their place wants."""
        for node in nodes_of(self.model, "QuantizeLinear", "DequantizeLinear"):
            scale = node.inputs[1]
            if not is_constant(scale):
                continue
            quantizes = node.op_type == "QuantizeLinear"
            name = f"{pair_name(node)}: {node.op_type}"
            scale_type = data_type(scale).name
            if quantizes and scale_type != self._type(node.inputs[0]):
                yield f"{name} has {scale_type} scales for a {self._type(node.inputs[0])} tensor"
            if not quantizes:
                yield from self._readers_type(node, scale_type, name)
            numbers = value_of(scale).float()
            low = float(numbers.min())
            high = float(numbers.max())
            least, most = _normal_numbers(scale_type)
            if not (least <= low and high <= most):  # NaN fails too
                ends = f"{low:.3g} to {high:.3g}"
                yield f"{name} has scales from {ends}, no normal {scale_type} numbers"
            point = input_at(node, 2)
            if is_constant(point) and bool(value_of(point).float().ne(0).any()):
                yield f"{name} has a zero point, which TensorRT does not have"
            for user in readers(node.outputs[0]) if quantizes else ():
                if user.op_type == "DequantizeLinear" and is_constant(user.inputs[1]):
                    other = value_of(user.inputs[1]).float()
                    if not torch.equal(other, numbers):
                        yield f"{name} and its DequantizeLinear have different scales"

    def _readers_type(self, node: Node, own: str, name: str) -> Iterator[str]:
        """Yield layers of another type than the scales of a DequantizeLinear in front of them."""
        for user in readers(node.outputs[0]):
            is_pair = user.op_type in ("QuantizeLinear", "DequantizeLinear", "Cast")
            layer_type = "FLOAT" if self._is_kept(user) else self.own
            if not is_pair and own != layer_type:
                yield (
                    f"{name} has {own} scales in front of {user.name}, which computes in "
                    f"{layer_type}"
                )

    def numbers(self) -> Iterator[str]:
        """Yield stored numbers that became infinite, or are no numbers."""
        for name, value in self.model.graph.initializers.items():
            if not self._type(value) or name in self.infinite:
                continue
            numbers = value_of(value).float()
            users = readers(value)
            # Masks of a model hold infinity; of float32 they are the model's own.
            is_mask = self._type(value) == "FLOAT" and not any(map(_computes, users))
            if bool(numbers.isnan().any()) or not (
                is_mask or bool(numbers.isfinite().all())
            ):
                what = f"holds numbers that {self._type(value)} cannot"
                yield f"{name}: {what}, read by {_named(users)}"


def _normal_numbers(type_name: str) -> tuple[float, float]:
    """Return the least and the largest normal number of a float type."""
    short = SCALE_TYPES.get(type_name.lower())
    if short is not None:
        return short.least, short.qmax
    single = torch.finfo(torch.float32)
    return single.tiny, single.max


def _computes(node: Node) -> bool:
    """Return True for a pair, and for a layer with stored weights."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear", *LAYERS)


def _behind_casts(nodes: list[Node]) -> Iterator[Node]:
    """Yield nodes, and in place of casts what reads their results."""
    for node in nodes:
        if node.op_type == "Cast":
            yield from _behind_casts(readers(node.outputs[0]))
        else:
            yield node


def _named(nodes: list[Node]) -> str:
    return ", ".join(str(node.name) for node in nodes) or "nothing"
