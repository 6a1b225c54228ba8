"""Additions of linear branches in the trace of one module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from torchq.fusion.linear_map.symbolic_ops import AffineTensor
from torchq.fusion.modules import is_layer, spatial_dims_of
from torchq.utils import copy_module

__all__ = ["Region", "find_region"]


class _Unknown:
    """A value whose number of channels nothing tells; no operator applies to it."""


class _Values(fx.Interpreter):
    """Runs a trace on :class:`AffineTensor` values.

    Where an operation is not linear, its result is a new source.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        inputs = [self.values.get(source) for source in n.all_input_nodes]
        if n.op == "output":
            return None
        if n.op == "placeholder" or any(isinstance(value, _Unknown) for value in inputs):
            result = self._source(n)
        else:
            try:
                result = super().run_node(n)
            except Exception:  # not linear, or the forward of a module asked for more than is known
                result = self._source(n)
        self.values[n] = result
        return result

    def _source(self, node: fx.Node) -> Any:
        """Return a new source with the channels that a user of ``node`` expects."""
        for user in node.users:
            module = self.fetch_attr(str(user.target)) if user.op == "call_module" else None
            if is_layer(module) and not isinstance(module, nn.Linear) and user.args[:1] == (node,):
                channels, device = module.in_channels, module.weight.device
                return AffineTensor.identity(node, channels, spatial_dims_of(module), device)
            if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
                mean = module.running_mean
                device = None if mean is None else mean.device
                dims = spatial_dims_of(module)
                return AffineTensor.identity(node, module.num_features, dims, device)
        return _Unknown()


@dataclass(frozen=True)
class Region:
    """An addition of linear branches: everything between ``source`` and ``result``.

    Attributes:
        source: the node that all branches read.
        result: the node that holds their sum.
        inner: the nodes of the branches, with ``result``.
        value: the map from ``source`` to ``result``.
    """

    source: fx.Node
    result: fx.Node
    inner: frozenset[fx.Node]
    value: AffineTensor

    def called_modules(self) -> list[str]:
        """Return the paths of the modules that the branches call, in order."""
        nodes = [node for node in self.source.graph.nodes if node in self.inner]
        return [str(node.target) for node in nodes if node.op == "call_module"]

    def extract(self, block: nn.Module) -> fx.GraphModule:
        """Return a module that computes the region alone, in float64 on the CPU.

        Args:
            block: the module that was traced; copied.
        """
        graph = fx.Graph()
        copies = {self.source: graph.placeholder("x")}
        needed, todo = {self.result}, [self.result]
        while todo:  # the branches, and what is computed from parameters alone
            inputs = todo.pop().all_input_nodes
            new = [node for node in inputs if node is not self.source and node not in needed]
            needed.update(new)
            todo += new
        for node in self.source.graph.nodes:
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[self.result])
        return fx.GraphModule(copy_module(block).cpu().double(), graph)


def find_region(traced: fx.GraphModule) -> Region | None:
    """Return the largest addition of linear branches that is worth one layer, or None.

    It is worth one layer where the merged kernel needs no more multiplications than the branches.
    Later results of the trace come first.
    """
    values = _Values(traced)
    values.run(*[None for node in traced.graph.nodes if node.op == "placeholder"])
    for node in reversed(traced.graph.nodes):
        value = values.values.get(node)
        if not isinstance(value, AffineTensor) or not isinstance(value.source, fx.Node):
            continue
        if value.additions == 0 or value.layers < 2:
            continue
        if value.geometry.kernel_numel > value.cost:
            continue
        inner = _between(value.source, node, values.values)
        if all(user in inner for each in inner if each is not node for user in each.users):
            return Region(value.source, node, inner, value)
    return None


def _between(source: fx.Node, result: fx.Node, values: dict[fx.Node, Any]) -> frozenset[fx.Node]:
    """Return the nodes with maps of ``source`` that ``result`` is computed from, and ``result``."""
    found, todo = {result}, [result]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node is source or node in found:
                continue
            if isinstance(values.get(node), AffineTensor):
                found.add(node)
                todo.append(node)
    return frozenset(found)
