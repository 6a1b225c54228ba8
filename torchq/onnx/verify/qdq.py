"""What a QuantizeLinear in a file does to a tensor, computed by torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchq.formats import Format
from torchq.onnx.ir import Graph
from torchq.onnx.passes.cleanup import FORMATS, attribute, axis_of, element_type

__all__ = ["Grid", "activation_grids", "pair_name", "read_record", "write_record"]

_RECORD = "torchq"


@dataclass(frozen=True)
class Grid:
    """Scale, zero point and type of one QuantizeLinear."""

    scale: Tensor
    zero: float
    format: Format
    axis: int
    block: int

    def scaled(self, x: Tensor) -> Tensor:
        """``x / scale``, float32, unrounded."""
        return x.to(torch.float32) / self._aligned(x)

    def codes(self, scales: Tensor) -> Tensor:
        """Rounded and saturated, without the zero point."""
        if not self.format.is_integer:
            return self.format.snap_(scales.clone())
        return scales.round().clamp_(
            self.format.quant_min - self.zero, self.format.quant_max - self.zero
        )

    def values(self, codes: Tensor) -> Tensor:
        """``codes * scale``."""
        return codes * self._aligned(codes)

    def _aligned(self, x: Tensor) -> Tensor:
        scale = self.scale
        if self.block:
            return scale.repeat_interleave(self.block, dim=self.axis).narrow(
                self.axis, 0, x.shape[self.axis]
            )
        return (
            scale.reshape([-1 if d == self.axis % x.dim() else 1 for d in range(x.dim())])
            if scale.numel() > 1
            else scale.reshape(())
        )


def pair_name(node: Any) -> str:
    """The quantizer that a QuantizeLinear or DequantizeLinear is named after."""
    return str(node.name).rpartition("/")[0]


def grid_of(graph: Graph, node: Any) -> Grid:
    """The grid of a QuantizeLinear, or of a DequantizeLinear of an initializer."""
    kind = (
        element_type(graph, node)
        if node.op_type == "QuantizeLinear"
        else graph.initializers[node.input[0]].data_type
    )
    zero = (
        float(graph.value(node.input[2]).to(torch.float32).reshape(-1)[0])
        if len(node.input) > 2 and node.input[2]
        else 0.0
    )
    scale = graph.value(node.input[1]).to(torch.float32)
    return Grid(scale, zero, FORMATS[kind], axis_of(node), int(attribute(node, "block_size", 0)))


def activation_grids(graph: Graph) -> dict[str, Grid]:
    """The grid of every quantizer of an activation in the file, in order, by name."""
    return {
        pair_name(node): grid_of(graph, node)
        for node in graph.of("QuantizeLinear")
        if node.input[1] in graph.initializers
    }


def write_record(graph: Graph, **entries: Any) -> None:
    """Note facts about the file in it, as JSON under the key ``torchq``; entries that are there already stay."""
    entries = {**read_record(graph), **entries}
    for index in reversed(range(len(graph.model.metadata_props))):
        if graph.model.metadata_props[index].key == _RECORD:
            del graph.model.metadata_props[index]
    graph.model.metadata_props.add(key=_RECORD, value=json.dumps(entries))


def read_record(graph: Graph) -> dict[str, Any]:
    """What :func:`write_record` noted; empty for other files."""
    found = next((p.value for p in graph.model.metadata_props if p.key == _RECORD), "{}")
    return dict(json.loads(found))
