"""A file run from the model's own quantized values: each layer answers for itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from torchq.onnx.export import undo_export
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_node,
    data_type,
    is_constant,
    load_model,
    onnx_ir,
    readers,
    replace_value,
    save_model,
)
from torchq.onnx.qdq import FLOAT_WEIGHT, pair_name, quantizer_nodes
from torchq.runtime import open_session

_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class ForcedFile:
    """A file in which the value of every quantizer is an input, and its codes are an output.

    The outputs of the file are computed from the given values too, so what differs there is the
    doing of the layers behind the last quantizers.
    """

    def __init__(self, path: str | os.PathLike[str], names: list[str]) -> None:
        self.names = names
        model = load_model(path)
        undo_export(model)
        self.outputs = [str(value.name) for value in model.graph.outputs]
        nodes = quantizer_nodes(model)
        self._codes = [_force(model, name, nodes[name]) for name in names]
        with TemporaryDirectory() as folder:
            file = Path(folder, "forced.onnx")
            save_model(model, file, check=False)  # The new inputs have no shapes.
            self._session = open_session(file, optimize=False)

    def run(
        self, feeds: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run the file."""
        given = {_given(name): values[name].float() for name in self.names}
        found = self._session.run({**feeds, **given}, [*self._codes, *self.outputs])
        count = len(self.names)
        return dict(zip(self.names, found[:count], strict=True)), found[count:]


def _given(name: str) -> str:
    return f"{name}/given"


def _force(model: Model, name: str, quantize: Node) -> str:
    """Cut the graph behind a quantizer, and return the name of its codes as floats."""
    codes, graph, single = quantize.outputs[0], model.graph, onnx_ir.DataType.FLOAT
    given = onnx_ir.Value(name=_given(name), type=onnx_ir.TensorType(single))
    graph.inputs.append(given)
    for node in readers(codes):
        if node.op_type == "DequantizeLinear":
            replace_value(node.outputs[0], given)
    value = add_node(quantize, "Cast", [codes], f"{name}/float codes", {"to": single.value})
    value.type = onnx_ir.TensorType(single)
    graph.outputs.append(value)
    return str(value.name)


def layers_behind(value: Value | None) -> tuple[str, ...]:
    """Return the layers that compute ``value`` from the nearest quantized or given values."""
    found: dict[str, None] = {}
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        node = None if current is None else current.producer()
        if node is None:
            continue
        if node.op_type == "DequantizeLinear":
            if is_constant(node.inputs[0]):
                found[pair_name(node).removesuffix(".weight_quantizer")] = None
            continue
        if node.op_type in _LAYERS and any(_is_float_weight(v) for v in node.inputs[1:2]):
            name = str(node.inputs[1].name)
            quantizer = name.removesuffix(FLOAT_WEIGHT) if name.endswith(FLOAT_WEIGHT) else ""
            found[quantizer.removesuffix(".weight_quantizer") or str(node.name)] = None
        new = [v for v in node.inputs if v is not None and v not in seen]
        seen.update(new)
        pending += new
    return tuple(found)


def _is_float_weight(value: Value) -> bool:
    return is_constant(value) and bool(data_type(value).is_floating_point())
