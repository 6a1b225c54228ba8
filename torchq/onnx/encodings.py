"""AIMET's encodings: a float ONNX file, and beside it a JSON file with the grid of each tensor.

Qualcomm's converters and AIMET's simulators take this pair. Encodings belong to tensors, so all
readers of a tensor see it quantized.

Sources: the encodings of AIMET 2.42 (versions 1.0.0, 2.0.0 and 0.6.1), and what its simulator for
ONNX did with them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.formats import IntFormat, integer_format
from torchq.functional import QParams
from torchq.nn import TensorQuantizer
from torchq.onnx.export import export_onnx
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    are_constant,
    load_model,
    names,
    nodes_of,
    readers,
    remove_unused,
    replace_value,
    save_model,
    value_of,
)
from torchq.onnx.named_tensors import named_tensors
from torchq.onnx.passes.pairs import repeats_a_quantizer
from torchq.onnx.qdq import pair_name, qparams_of
from torchq.runtime import Runtime
from torchq.utils import (
    bullets,
    check_fields,
    network_of,
    parse_json,
    replacing,
    short_repr,
    undone_on_error,
)
from torchq.workflow import calibrate_weights, quantizers

#: Operators that only move or select elements: AIMET may skip the grid of their result, or give it
#: to what they read; with 2.0.0 it was seen to do so with Reshape and MaxPool.
MOVES = names(
    "Reshape Flatten Transpose Squeeze Unsqueeze Slice Split Gather Expand Tile Pad MaxPool"
)
VERSIONS = ("1.0.0", "2.0.0")


@dataclass(frozen=True)
class EncodingsReport:
    """What :func:`export_encodings` wrote.

    Attributes:
        path: The float ONNX file.
        encodings: The JSON file.
        activations: Tensors of the graph that have an encoding.
        parameters: Stored tensors that have one.
        moved: Those of the activations that readers may skip, or give to another tensor: results
            of operators that only move elements.
        widened: Tensors that torchq quantizes for some of their readers alone, with those that a
            reader of encodings will quantize them for too.
    """

    path: Path
    encodings: Path
    activations: tuple[str, ...]
    parameters: tuple[str, ...]
    moved: tuple[str, ...]
    widened: tuple[str, ...]

    def __str__(self) -> str:
        note = "comes of moving elements, so readers may skip its encoding"
        remarks = [f"{name}: {note}" for name in self.moved]
        remarks += [
            f"{reader}, which reads it in float here" for reader in self.widened
        ]
        counts = (
            f"{len(self.activations)} activations, {len(self.parameters)} parameters"
        )
        lines = [
            f"{self.path}, {self.encodings.name}: {counts}",
            *([bullets(remarks)] * bool(remarks)),
        ]
        return "\n".join(lines)


def export_encodings(
    model: nn.Module,
    example: object,
    path: str | os.PathLike[str],
    *,
    target: str | Runtime | None = None,
    version: Literal["1.0.0", "2.0.0"] = "1.0.0",
    opset: int | None = None,
) -> EncodingsReport:
    """Write a quantized model as a float ONNX file with AIMET's encodings beside it.

    Weights in the file are the values of their codes. Both files are replaced, or none.

    Args:
        model: A calibrated model, quantized for ``target``: a model whose operators between layers
            are not quantized is another network there.
        example: As for :func:`torchq.export_onnx`.
        path: The ``.onnx`` file; the encodings go to the same name that ends in ``.encodings``.
        target: The runtime whose codes are written; None takes the one of the model's plan.
        version: Of the encodings. AIMET 2.42 moves entries of reshapes with 2.0.0.
        opset: As for :func:`torchq.export_onnx`.

    Returns:
        What was written, and which entries readers may skip; ``print`` it.

    Raises:
        ConfigError: There is no such version or target.
        ExportError: Codes are no integers, or a tensor has several grids. And see
            :func:`torchq.export_onnx`.
    """
    model = network_of(model)
    if version not in VERSIONS:
        raise ConfigError(
            f"export_encodings: got version {short_repr(version)}; expected one of {VERSIONS}"
        )
    path = Path(path)
    listed = path.with_suffix(".encodings")
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "pairs.onnx"
        export_onnx(model, example, pairs, target=target, opset=opset, progress=False)
        graph = load_model(pairs)
    activations, parameters, widened = _take_pairs(graph)
    remove_unused(graph)
    entry = _ENTRIES[version]
    groups = [
        [entry(str(value.name), qparams) for value, qparams in qparams_by_value.items()]
        for qparams_by_value in (activations, parameters)
    ]
    with replacing(path, path.with_name(f"{path.name}.data"), listed) as (
        file,
        _,
        encodings_file,
    ):
        save_model(graph, file)
        encodings_file.write_text(json.dumps(_document(version, *groups), indent=1))
    moved = [
        v
        for v in activations
        if v.producer() is not None and v.producer().op_type in MOVES
    ]
    return EncodingsReport(
        path,
        listed,
        tuple(str(value.name) for value in activations),
        tuple(str(value.name) for value in parameters),
        tuple(str(value.name) for value in moved),
        tuple(widened),
    )


def _take_pairs(
    graph: Model,
) -> tuple[dict[Value, QParams], dict[Value, QParams], list[str]]:
    """Remove the Q/DQ pairs of a graph; return the grids of activations and of parameters.

    Before: QuantizeLinear -> DequantizeLinear, and DequantizeLinear of stored codes.
    After: The tensor in front of them, and stored float values.
    """
    activations: dict[Value, QParams] = {}
    parameters: dict[Value, QParams] = {}
    for node in nodes_of(graph, "QuantizeLinear"):
        if repeats_a_quantizer(node):
            continue  # The encoding of the quantizer behind it says the same.
        source = node.inputs[0]
        qparams = _integers(node)
        first_qparams = activations.setdefault(source, qparams)
        if not _equal(first_qparams, qparams):
            raise ExportError(
                f"export_encodings: {source.name}: its readers quantize it in different ways (one "
                f"is {pair_name(node)}); expected one grid. Pass target= and example= to quantize_"
            )
    apart = [
        f"{value.name}: quantized for {', '.join(sorted(floats))} too"
        for value in activations
        if (
            floats := {
                str(n.name) for n in readers(value) if n.op_type != "QuantizeLinear"
            }
        )
    ]
    for node in nodes_of(graph, "DequantizeLinear"):
        codes = node.inputs[0]
        pair = node.inputs[0].producer()
        if pair is not None:
            replace_value(node.outputs[0], pair.inputs[0])
        elif are_constant(node.inputs):
            qparams = qparams_of(node)
            values = qparams.dequantize(qparams.centered(value_of(codes)))
            name = pair_name(node).removesuffix("_quantizer")
            stored = add_initializer(
                graph.graph, name or f"{codes.name}/values", values
            )
            replace_value(node.outputs[0], stored)
            if qparams.format.bits <= 16:  # biases of 32 bits are exact enough in float
                parameters[stored] = _integers(node)
    return activations, parameters, apart


def _integers(node: Node) -> QParams:
    """Return the parameters of a node, which must be integers."""
    if not are_constant(node.inputs[1:]) or not isinstance(
        qparams_of(node).format, IntFormat
    ):
        raise ExportError(
            f"export_encodings: {pair_name(node)}: got ranges of each call or a float format; "
            "expected integers with fixed ranges. Use an integer recipe"
        )
    return qparams_of(node)


def _equal(first: QParams, second: QParams) -> bool:
    same = torch.equal(first.scale, second.scale) and first.format == second.format
    return same and torch.equal(first.zero_point, second.zero_point)


# --- the entries of versions --------------------------------------------------------------------


def _entry_1(name: str, q: QParams) -> dict[str, object]:
    scale = q.scale.flatten()
    point = q.zero_point.flatten().expand(q.scale.numel())
    kind = "PER_BLOCK" if q.block else "PER_CHANNEL" if q.scale.dim() else "PER_TENSOR"
    entry = {
        "name": name,
        "dtype": "INT",
        "bw": q.format.bits,
        "enc_type": kind,
        "is_sym": bool(q.quant_min) and q.has_zero_point(0),
        "scale": scale.tolist(),
        "offset": [int(q.quant_min - p) for p in point.tolist()],
    }
    return entry | ({"block_size": q.block} if q.block else {})


def _entry_2(name: str, q: QParams) -> dict[str, object]:
    entry: dict[str, Any] = {
        "name": name,
        "output_dtype": q.format.name,
        "y_scale": q.scale.tolist(),
    }
    if not q.has_zero_point(0):
        entry["y_zero_point"] = q.zero_point.to(torch.int64).tolist()
    if q.scale.dim():
        entry["axis"] = q.axis
    return entry | ({"block_size": q.block} if q.block else {})


_ENTRIES = {"1.0.0": _entry_1, "2.0.0": _entry_2}


def _document(
    version: str, activations: list[Any], parameters: list[Any]
) -> dict[str, object]:
    if version == "2.0.0":
        return {"version": version, "encodings": [*activations, *parameters]}
    return {
        "version": version,
        "activation_encodings": activations,
        "param_encodings": parameters,
        "quantizer_args": {},
    }


def read_encodings(path: str | os.PathLike[str]) -> dict[str, QParams]:
    """Return the grid of each tensor that a file of encodings names, of version 1.0.0 or 2.0.0.

    Codes are signed where the file says that a grid is symmetric (1.0.0) or names a signed type.
    Version 1.0.0 has no axis: one that differs by channel has the axis None.

    Raises:
        ConfigError: No such file of encodings: not JSON, another version, an entry without its
            fields, or codes that are no integers. The text names the entry.
    """
    where = f"read_encodings: {path}"
    data = parse_json(Path(path).read_text("utf-8", errors="replace"), where)
    version = data.get("version") if isinstance(data, dict) else None
    if version not in VERSIONS:
        raise ConfigError(
            f"{where}: got version {short_repr(version)}; expected one of {VERSIONS}. Export the "
            "encodings again with one of these"
        )
    keys = (
        ("encodings",)
        if version == "2.0.0"
        else ("activation_encodings", "param_encodings")
    )
    qparams_by_name: dict[str, QParams] = {}
    for entry in _entries(data, keys, where):
        try:
            qparams_by_name[entry["name"]] = (
                _read_2(entry) if version == "2.0.0" else _read_1(entry)
            )
        except (KeyError, TypeError, ValueError, RuntimeError, ConfigError) as error:
            raise ConfigError(
                f"{where}: {short_repr(entry.get('name'))}: {type(error).__name__}: {error}; "
                f"expected the fields of version {version}, of integers"
            ) from None
    return qparams_by_name


def apply_encodings(
    model: nn.Module,
    encodings: Mapping[str, QParams] | str | os.PathLike[str],
    example: object,
) -> dict[str, tuple[str, ...]]:
    """Give a quantized model the grids of a file of encodings, in place of calibrating it.

    Scales and offsets of activations and weights are held as they are. Encodings of tensors that no
    quantizer reads are left out.

    Args:
        model: What :func:`torchq.from_onnx` made of the ONNX file that the encodings belong to, and
            quantized for a target or by a config whose formats are those of the encodings.
        encodings: A path, or what :func:`read_encodings` returned.
        example: As for :func:`apply_calibration_cache`.

    Returns:
        Path of a quantizer -> the names of the tensors that it reads.

    Raises:
        ConfigError: The model was not read from an ONNX file. And see :func:`read_encodings`.
        CalibrationError: A quantizer's tensor has no encoding, as in those of another network, or
            has a grid that the quantizer cannot hold. The model stays as it was.
    """
    model = network_of(model)
    grids = encodings if isinstance(encodings, Mapping) else read_encodings(encodings)
    where = "the encodings" if isinstance(encodings, Mapping) else str(encodings)
    tensors_by_path = named_tensors(
        where, model, example, dict.fromkeys(grids, True), weights=True
    )
    quantizer_by_path = quantizers(model)
    with undone_on_error(model):
        calibrate_weights(model)  # which gives each range the shape of its weight
        for path, names in tensors_by_path.items():
            for name in names:
                _hold(path, quantizer_by_path[path], name, grids[name], grids[names[0]])
    return {
        path: tuple(dict.fromkeys(names)) for path, names in tensors_by_path.items()
    }


def _hold(
    path: str, quantizer: TensorQuantizer, name: str, grid: QParams, first: QParams
) -> None:
    """Hold a grid as it is; that of the first tensor that the quantizer reads has to equal it."""
    d = quantizer.descriptor
    held = grid.stored(signed=not quantizer.descriptor.unsigned)
    shape = quantizer.amax.shape if quantizer.calibrated else torch.Size()
    fits = held.format.bits == d.format.bits and held.scale.numel() in (
        1,
        shape.numel(),
    )
    if held.block or not fits or (d.symmetric and not held.has_zero_point(0)):
        kind = "" if grid.has_zero_point(0) else "asymmetric "
        raise CalibrationError(
            f"{path}: got {kind}{grid.format} with {grid.scale.numel()} scales for {name}, and the "
            f"quantizer is {d} with {shape.numel()}; expected the same. Pass quantize_ a config "
            "with such descriptors, or leave the layer in float with exclude="
        )
    if not _equal(grid, first):
        raise CalibrationError(
            f"{path}: reads {name} and another tensor with another grid; expected one grid. Leave "
            "the layer in float with exclude="
        )
    scale, point = (
        number.expand(shape) if number.numel() == 1 else number.reshape(shape)
        for number in (held.scale, held.zero_point)
    )
    quantizer.set_qparams(scale, None if d.symmetric else point)


def _entries(
    data: dict[str, object], keys: tuple[str, ...], where: str
) -> Iterator[dict[str, Any]]:
    for key in keys:
        entries = data.get(key, [])
        if not isinstance(entries, list):
            raise ConfigError(
                f"{where}: {key}: got a {type(entries).__name__}; expected a list"
            )
        for entry in entries:
            fields = entry if isinstance(entry, dict) else ()
            yield dict(
                check_fields(entry, f"{where}: {key}", known=fields, required=("name",))
            )


def _read_1(entry: dict[str, Any]) -> QParams:
    if entry["dtype"] != "INT" or entry["enc_type"] not in (
        "PER_TENSOR",
        "PER_CHANNEL",
    ):
        raise ValueError(f"got {entry['dtype']} {entry['enc_type']}")
    format = integer_format(int(entry["bw"]), unsigned=not entry["is_sym"])
    shape = () if entry["enc_type"] == "PER_TENSOR" else (-1,)
    scale = torch.tensor(entry["scale"], dtype=torch.float32).reshape(shape)
    offset = torch.tensor(entry["offset"], dtype=torch.float32).reshape(shape)
    return QParams(scale, (format.quant_min - offset).expand(scale.shape), format)


def _read_2(entry: dict[str, Any]) -> QParams:
    kind = str(entry["output_dtype"])
    if not kind.removeprefix("u").startswith("int") or "per_block_int_scale" in entry:
        raise ValueError(f"got {kind}{' in blocks' * ('per_block_int_scale' in entry)}")
    format = integer_format(
        int(kind.rpartition("int")[2]), unsigned=kind.startswith("u")
    )
    scale = torch.tensor(entry["y_scale"], dtype=torch.float32)
    point = torch.tensor(entry.get("y_zero_point", 0), dtype=torch.float32).expand(
        scale.shape
    )
    return QParams(
        scale, point, format, entry.get("axis"), int(entry.get("block_size", 0))
    )
