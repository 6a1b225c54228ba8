"""The graph and the modules that a file is converted into, as converters see them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.frontends.onnx.paths import free_path, parent_of
from torchq.frontends.onnx.values import Constant, Quantization, Value
from torchq.nn import TensorQuantizer

__all__ = ["GraphBuilder"]


class GraphBuilder:
    """What has been converted so far.

    Args:
        where: how errors begin.
        convert_nodes: converts the nodes of a sub-graph in place, and returns its outputs.

    Attributes:
        graph, root: the calls, and the modules and tensors that the calls name.
        values: of the tensors of the file, by name.
        shapes, dtypes: of these tensors, as far as they are known.
        readers: how often each tensor is read.
        codes: of a node that makes codes its source and how the source is quantized.
        dequantized: of a node that makes codes the values of the codes.
        quantizers: of a node that calls a quantizer its source and the quantizer.
        weights: how a constant is quantized in the file.
    """

    def __init__(self, where: str, convert_nodes: Callable[[Any], list[Value]]) -> None:
        self.where, self.convert_nodes = where, convert_nodes
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[str, Value] = {}
        self.shapes: dict[str, list[int | None]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self.readers: collections.Counter[str] = collections.Counter()
        self.codes: dict[fx.Node, tuple[Value, Quantization]] = {}
        self.dequantized: dict[fx.Node, Value] = {}
        self.quantizers: dict[fx.Node, tuple[Value, TensorQuantizer]] = {}
        self.weights: dict[Constant, Quantization] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []

    def parameter(
        self, value: Constant, key: str = "", tensor: Tensor | None = None
    ) -> nn.Parameter:
        """Return a parameter with the values of a constant: the same one for the same initializer.

        Args:
            value: the constant.
            key: tells apart different forms of one initializer, such as its transpose.
            tensor: this form, by default the constant itself.
        """
        tensor = (value.tensor if tensor is None else tensor).contiguous()
        if not value.name:
            return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        found = self._parameters.get(f"{value.name}\0{key}")
        if found is None:
            found = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            self._parameters[f"{value.name}\0{key}"] = found
        return found

    def buffer(self, value: Constant) -> fx.Node:
        """Return a node that gives a constant, a buffer of the result."""
        known = self._buffers.get(id(value.tensor))
        if known is not None:
            return known
        # A slash separates parts of what belongs to one node, whose path a module may take later.
        name = value.name.replace(".", "_") if "/" in value.name else value.name
        path = free_path(self.root, name.replace("/", "_") or "constant")
        parent_of(self.root, path).register_buffer(path.rpartition(".")[2], value.tensor)
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            node = self.graph.get_attr(path)
        else:
            with self.graph.inserting_before(first):
                node = self.graph.get_attr(path)
        self._buffers[id(value.tensor)] = node
        self._kept.append(value.tensor)  # ids stay unique while tensors live
        return node

    def add_module(self, name: str, module: nn.Module, op_type: str) -> str:
        """Put a module into the result under a path made from ``name``; return the path."""
        path = free_path(self.root, name, op_type)
        parent_of(self.root, path).add_module(path.rpartition(".")[2], module)
        return path

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
