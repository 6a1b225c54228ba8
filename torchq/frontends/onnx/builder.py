"""What is collected while an ONNX file is converted."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from torchq.frontends import building
from torchq.frontends.building import Constant, Value
from torchq.frontends.onnx.values import Quantization
from torchq.nn import TensorQuantizer


class GraphBuilder(building.GraphBuilder):
    """What has been converted so far.

    Args:
        where: how errors begin.
        convert: converts the nodes of a sub-graph into a builder, and returns its outputs.

    Attributes:
        shapes, dtypes: of the tensors of the file, as far as they are known.
        readers: how often each tensor is read.
        codes: of a node that makes codes its source and how the source is quantized.
        dequantized: of a node that makes codes the values of the codes.
        quantizers: of a node that calls a quantizer its source and the quantizer.
        weights: how a constant is quantized in the file.
        shaped: of a node that computes a whole shape the value that has it, where the number of its
            dimensions is not known.
        four_bits: constants of int4 or uint4, which are tensors of int8 or uint8.
    """

    def __init__(self, where: str, convert: Callable[[GraphBuilder, Any], list[Value]]) -> None:
        super().__init__(where)
        self._convert = convert
        self.shapes: dict[str, list[int | None]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self.readers: collections.Counter[str] = collections.Counter()
        self.codes: dict[fx.Node, tuple[Value, Quantization]] = {}
        self.dequantized: dict[fx.Node, Value] = {}
        self.quantizers: dict[fx.Node, tuple[Value, TensorQuantizer]] = {}
        self.weights: dict[Constant, Quantization] = {}
        self.shaped: dict[Value, fx.Node] = {}
        self.four_bits: set[Constant] = set()

    def convert_nodes(self, graph: Any) -> list[Value]:
        """Convert the nodes of a sub-graph in place, and return its outputs."""
        return self._convert(self, graph)

    def inside(self) -> GraphBuilder:
        """Return a builder for a sub-graph, which knows the constants of this one.

        Parameters are shared. What this graph computes is not known there.
        """
        inner = GraphBuilder(self.where, self._convert)
        inner.share_parameters(self)
        known = self.values.items()
        inner.values = {n: v for n, v in known if v is None or isinstance(v, Constant)}
        inner.shapes, inner.dtypes = dict(self.shapes), dict(self.dtypes)
        inner.readers, inner.weights = self.readers, self.weights
        inner.four_bits = self.four_bits
        return inner

    def add_bias(self, node: fx.Node, value: Constant) -> fx.Node | None:
        """Give a constant to the linear layer that ``node`` calls as its bias.

        Returns:
            the node; None if it calls no linear layer without a bias, or something else reads its
            result.
        """
        if node.op != "call_module" or node.users:
            return None
        layer = self.root.get_submodule(str(node.target))
        if type(layer) is not nn.Linear or layer.bias is not None:
            return None
        if (
            tuple(value.tensor.shape) != (layer.out_features,)
            or value.tensor.dtype != layer.weight.dtype
        ):
            return None
        if sum(other is node for other in self.values.values()) > 1 or self._reads(node) > 1:
            return None
        layer.bias = self.parameter(value)
        return node

    def _reads(self, node: fx.Node) -> int:
        """Return how many inputs of nodes and outputs of the file read the value of ``node``."""
        names = {name for name, value in self.values.items() if value is node}
        return sum(self.readers[name] for name in names)
