"""Passes that find out what the nodes of a graph compute."""

from __future__ import annotations

from torchq.graph.facade.graph import Graph, graph_pass
from torchq.graph.runner import GraphRunner

__all__ = ["infer_dtype", "infer_shape"]


@graph_pass(requires=("example",), provides=("shape",))
def infer_shape(graph: Graph) -> Graph:
    """Note the shape of each value by running the graph on its example.

    Before: the graph has an example.
    After: the attribute ``shape`` has a tuple for each node that gives a tensor, by its name.
    """
    found = GraphRunner(graph.module).trace_meta(graph.attributes["example"])
    shapes = {name: meta.shape for name, meta in found.items() if meta.shape is not None}
    return graph.with_attributes(shape=shapes)


@graph_pass(requires=("example",), provides=("dtype",))
def infer_dtype(graph: Graph) -> Graph:
    """Note the element type of each value by running the graph on its example.

    Before: the graph has an example.
    After: the attribute ``dtype`` has a torch.dtype for each node that gives a tensor, by its name.
    """
    found = GraphRunner(graph.module).trace_meta(graph.attributes["example"])
    dtypes = {name: meta.dtype for name, meta in found.items() if meta.dtype is not None}
    return graph.with_attributes(dtype=dtypes)
