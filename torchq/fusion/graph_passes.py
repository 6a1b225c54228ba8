"""The merges of ``fuse_`` as passes of :class:`torchq.graph.Graph`."""

from __future__ import annotations

import copy

from torchq.fusion.api import fuse_
from torchq.graph import Graph, graph_pass


def _fused(graph: Graph, reparameterize: bool) -> Graph:
    """Return a graph whose model is a fused copy."""
    module = copy.deepcopy(graph.module)
    example = graph.attributes.get("example")
    fuse_(module, example, reparameterize=reparameterize, progress=False)
    return graph.with_module(module)


@graph_pass()
def fold_bn(graph: Graph) -> Graph:
    """Fold each BatchNorm into the layer before it, or behind it, where that is exact.

    Before: ``x -> Conv -> BatchNorm -> reader``.
    After: ``x -> Conv -> Identity -> reader``.
    """
    return _fused(graph, reparameterize=False)


@graph_pass()
def merge_branches(graph: Graph) -> Graph:
    """Merge parallel linear branches into one layer, and fold BatchNorms.

    Before: ``x -> Conv3x3 + Conv1x1 + x -> reader``.
    After: ``x -> Conv3x3 -> reader``.
    """
    return _fused(graph, reparameterize=True)
