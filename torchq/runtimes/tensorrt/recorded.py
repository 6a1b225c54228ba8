"""The largest magnitude of each tensor of a graph, which tells what a short float type can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from torchq.errors import ExportError, MissingExtraError
from torchq.onnx.ir import (
    Model,
    Value,
    add_initializer,
    add_node,
    add_numbers,
    is_constant,
    load_model,
    nodes_of,
    onnx_ir,
    save_model,
)
from torchq.onnx.passes.constants import known_types
from torchq.onnx.qdq import qparams_of
from torchq.runtime import open_session


def recorded_ranges(
    model: Model, feeds: Mapping[str, Tensor]
) -> tuple[dict[str, float], str]:
    """Return the largest finite magnitude of each float tensor, by name, and what is missing.

    It is that of a run of the float32 graph on the example, or what the codes of a quantizer stand
    for where that is more: they come from the calibration. Without the package that runs the graph
    the second part is all, and the text says so.
    """
    ranges = {}
    missing = ""
    try:
        ranges = _run(model, feeds)
    except (ExportError, MissingExtraError) as error:
        missing = f"tensors without a quantizer have no recorded range ({error})"
    for node in nodes_of(model, "QuantizeLinear"):
        if is_constant(node.inputs[1]):
            qparams = qparams_of(node)
            largest = float(qparams.scale.max()) * max(
                qparams.quant_max, -qparams.quant_min
            )
            for value in (
                node.inputs[0],
                *(u.outputs[0] for u, _ in node.outputs[0].uses()),
            ):
                name = str(value.name)
                ranges[name] = max(ranges.get(name, 0.0), largest)
    return ranges, missing


def _run(model: Model, feeds: Mapping[str, Tensor]) -> dict[str, float]:
    """Run the graph with one number more for each float tensor, its largest magnitude."""
    if any(tensor.dtype is torch.bfloat16 for tensor in feeds.values()):
        raise ExportError("the example is bfloat16, a type that NumPy lacks")
    with TemporaryDirectory() as folder:
        file = Path(folder, "recorded.onnx")
        save_model(model, file, check=False)
        copy = load_model(file, check=False)
        types = known_types(copy)
        names = [
            str(value.name)
            for node in copy.graph
            for value in node.outputs
            if types.get(value.name) == onnx_ir.DataType.FLOAT
        ]
        values = {value.name: value for node in copy.graph for value in node.outputs}
        outputs = [_largest(copy, values[name]) for name in names]
        save_model(copy, file, check=False)
        session = open_session(file, optimize=False)
        input_names = {value.name for value in model.graph.inputs}
        results = session.run(
            {n: t for n, t in feeds.items() if n in input_names}, outputs
        )
    numbers = zip(names, (float(result) for result in results), strict=True)
    return {name: number for name, number in numbers if not math.isnan(number)}


def _largest(model: Model, value: Value) -> str:
    """Return the name of a new output: the largest finite magnitude, 0 for no elements."""
    graph = model.graph
    node = value.producer()
    name = f"{value.name}/largest"
    zero = add_initializer(graph, f"{name}/zero", torch.zeros(1))
    flat = add_numbers(graph, f"{name}/flat", [-1])
    size = add_node(node, "Abs", [value], f"{name}/abs")
    wide = add_node(size.producer(), "IsInf", [size], f"{name}/infinite")
    finite = add_node(wide.producer(), "Where", [wide, zero, size], f"{name}/finite")
    row = add_node(finite.producer(), "Reshape", [finite, flat], f"{name}/row")
    more = add_node(row.producer(), "Concat", [row, zero], f"{name}/more", {"axis": 0})
    output = add_node(more.producer(), "ReduceMax", [more], name, {"keepdims": 0})
    output.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    graph.outputs.append(output)
    return str(output.name)
