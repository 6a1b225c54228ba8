"""Sub-graphs as modules of their own, for conditions that the network computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from torchq.frontends.onnx.builder import GraphBuilder
from torchq.frontends.onnx.context import NodeContext


def names_from_outside(graph: Any) -> list[str]:
    """Return the names that a sub-graph reads and does not compute, in order.

    Args:
        graph: an ``onnx.GraphProto``; its own sub-graphs count too.
    """
    own = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    own |= {name for node in graph.node for name in node.output}
    return list(dict.fromkeys(name for name in _read(graph) if name and name not in own))


def _read(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from names_from_outside(attribute.g)
    yield from (output.name for output in graph.output)


def branch_module(outer: GraphBuilder, graph: Any, names: Sequence[str]) -> fx.GraphModule:
    """Return a sub-graph as a module that takes the values of ``names``.

    Args:
        outer: what the graph around it has collected; parameters are shared with it.
        graph: an ``onnx.GraphProto``.
        names: values of ``outer`` that the network computes.
    """
    inner = outer.inside()
    for name in names:
        node = inner.input(name)
        node.meta["onnx_name"] = name
        inner.values[name] = node
    end = NodeContext(inner, "output", "output", 1, {}, [], [], [])
    outputs = [end.tensor(value) for value in inner.convert_nodes(graph)]
    found = [output.name for output in graph.output]
    return inner.finish(outputs, graph.name or "Branch", names, found, [None] * len(names))
