"""A file whose layers read codes that they are given, so that none reads what another computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from torchq.functional import QParams
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_node,
    computed_by,
    is_output,
    load_model,
    onnx_ir,
    remove_unused,
    replace_value,
    save_model,
)
from torchq.onnx.passes.pairs import clip_beyond
from torchq.onnx.qdq import element_type, qparams_of, quantizer_nodes
from torchq.onnx.verify.exposed import ExposedFile, Ran
from torchq.runtime import Runtime

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
_BYTE = 8
_OF_ONE_GRID = ("Sigmoid", "HardSigmoid", "Tanh")
_TYPES = {
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "UINT16": torch.uint16,
    "INT16": torch.int16,
}


@dataclass(frozen=True)
class Computed:
    """What an output of a cut file holds.

    Attributes:
        name: of the quantizer.
        wide: the parameters of the codes that it holds, where those of the quantizer are only a
            conversion of these.
        qparams: the parameters of the quantizer.
    """

    name: str
    wide: QParams | None
    qparams: QParams

    def codes(self, output: Tensor) -> Tensor:
        """Return the codes of the quantizer in float32."""
        if self.wide is None:
            return output.float()
        values = self.wide.dequantize(self.wide.centered(output.float()))
        return self.qparams.codes(self.qparams.scaled(values))


@dataclass(frozen=True)
class _Opened:
    """A file that was cut: its function, and the names of what it takes and returns."""

    run: Run
    types: Mapping[str, torch.dtype]
    inputs: tuple[str, ...]
    computed: tuple[Computed, ...]


class CutFile:
    """A file that is cut at each quantizer of an activation, beside the same file as it is written.

    The codes of a quantizer are a result of the cut file, and an input that what is behind reads.
    All layers are in one graph, so that one compile is enough.

    Attributes:
        session: What runs, in words.
        dropped: Quantizers whose codes it does not have: none.
    """

    def __init__(
        self, path: Path, names: list[str], written: ExposedFile, runtime: Runtime
    ) -> None:
        self.session = (
            f"each layer of the file on {runtime.emulates}, given equal codes"
        )
        self.dropped: tuple[str, ...] = ()
        self._path = path
        self._names = names
        self._written = written
        self._runtime = runtime
        self._opened: _Opened | None = None

    def run(self, feeds: Mapping[str, Tensor]) -> Ran:
        """Return the codes that each quantizer is given, and those that are computed.

        What the file only quantizes, as its inputs, is not computed; nor are its outputs.
        """
        given = self._written.run(feeds).given
        if self._opened is None:
            self._opened = self._cut(given)
        opened = self._opened
        codes = {
            _input_of(name): given[name].to(dtype)
            for name, dtype in opened.types.items()
        }
        available = {**feeds, **codes}
        results = opened.run({name: available[name] for name in opened.inputs})
        computed = zip(opened.computed, results, strict=True)
        return Ran([], given, {row.name: row.codes(codes) for row, codes in computed})

    def _cut(self, given: Mapping[str, Tensor]) -> _Opened:
        model = load_model(self._path)
        nodes = quantizer_nodes(model)
        types = {name: _TYPES[element_type(nodes[name]).name] for name in self._names}
        ranks = {name: given[name].dim() for name in self._names}
        computed = cut(model, {name: nodes[name] for name in self._names}, ranks)
        inputs = tuple(str(value.name) for value in model.graph.inputs)
        with TemporaryDirectory() as folder:
            file = Path(folder, "cut.onnx")
            save_model(model, file, check=False)
            return _Opened(self._runtime.emulated(file), types, inputs, tuple(computed))


def cut(
    model: Model, nodes: Mapping[str, Node], ranks: Mapping[str, int]
) -> list[Computed]:
    """Let what is behind quantizers read codes from new inputs, and return what is computed.

    Before: layer -> QuantizeLinear -> DequantizeLinear -> layer -> QuantizeLinear -> ...
    After: layer -> QuantizeLinear -> output. Input of codes -> DequantizeLinear -> layer -> ...
    What reads inputs of the file alone has no such output: it is no layer. Of a layer whose codes
    are converted to fewer bits, the output is what is converted: a chip may take no graph that ends
    with a conversion.

    Args:
        model: changed in place; its outputs are those of the quantizers.
        nodes: quantizers of activations by name, in order.
        ranks: dimensions of their tensors.

    Returns:
        What the outputs hold, in order.
    """
    graph = model.graph
    del graph.outputs[:]
    computed = []
    for name, node in nodes.items():
        codes = node.outputs[0]
        kind = onnx_ir.TensorType(element_type(node))
        shape = onnx_ir.Shape([None] * ranks[name])
        given = onnx_ir.Value(name=_input_of(name), type=kind, shape=shape)
        codes.type = kind
        replace_value(codes, given)
        graph.inputs.append(given)
        value = node.inputs[0]
        if value.producer() is None:
            continue
        dequantize = computed_by(value, "DequantizeLinear")
        converted = dequantize and computed_by(dequantize.inputs[0], "QuantizeLinear")
        if not converted:
            graph.outputs.append(_as_output(node))
            computed.append(Computed(name, None, qparams_of(node)))
            continue
        wide = converted.outputs[0]
        wide.type = onnx_ir.TensorType(element_type(converted))
        if not is_output(wide):
            graph.outputs.append(wide)
            computed.append(Computed(name, qparams_of(converted), qparams_of(node)))
    remove_unused(model)
    for value in list(graph.inputs):
        if not value.uses() and not is_output(value):
            graph.inputs.remove(value)
    return computed


def _as_output(node: Node) -> Value:
    """Return the codes of a quantizer, those of sigmoids behind an operator that changes nothing.

    The emulator gives a sigmoid of 16 bits whose codes leave the graph the scale 1 / 65535,
    whatever its own is. With an operator behind, as in whole files, it has its own.
    """
    codes = node.outputs[0]
    is_wide = codes.dtype.bitwidth > _BYTE
    if not is_wide or computed_by(node.inputs[0], *_OF_ONE_GRID) is None:
        return codes
    parameters = list(node.inputs[1:])
    name = f"{codes.name}/kept"
    value = add_node(node, "DequantizeLinear", [codes, *parameters], f"{name}/value")
    same = clip_beyond(value.producer(), node)
    again = add_node(
        same.producer(), "QuantizeLinear", [same, *parameters], f"{name}/codes"
    )
    again.type = codes.type
    return again


def _input_of(name: str) -> str:
    return f"{name}/given"
