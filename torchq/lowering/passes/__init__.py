"""Passes that turn a trace of integer layers into a graph that hands codes from layer to layer.

A pass is a function ``(editor, node) -> bool`` that looks at one node, changes the graph around
it if it fits, and returns whether it did. Its docstring shows the graph before and after. A new
pass is one function and its place in a list at the end of its file.
"""

import torch
from torch import fx

from torchq.lowering.passes.editor import GraphEditor, apply_pass
from torchq.lowering.passes.fuse import FINISH, FUSE
from torchq.lowering.passes.insert import INSERT_QDQ

__all__ = ["FINISH", "FUSE", "INSERT_QDQ", "run_passes"]


def run_passes(graph_module: fx.GraphModule, dtype: torch.dtype) -> None:
    """Run all passes on a traced model, in place."""
    editor = GraphEditor(graph_module, dtype)
    for rewrite in INSERT_QDQ:
        apply_pass(editor, rewrite)
    editor.prune()
    while any(apply_pass(editor, rewrite) for rewrite in FUSE):
        pass  # A pass that changed something may have found new work for the first one.
    for rewrite in FINISH:
        apply_pass(editor, rewrite)
    editor.graph.lint()
    graph_module.recompile()
    graph_module.delete_all_unused_submodules()
