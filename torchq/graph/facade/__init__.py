"""A graph as a value: passes by name give new graphs, and its text forms show it."""

from torchq.graph.facade import inference, rewrites
from torchq.graph.facade.graph import PASSES, Graph, GraphPass, graph_pass

__all__ = ["PASSES", "Graph", "GraphPass", "graph_pass", "inference", "rewrites"]
