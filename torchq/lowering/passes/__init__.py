"""Passes that turn a trace of integer layers into a graph that hands codes from layer to layer.

A pass is a function ``(editor, node) -> bool`` that looks at one node, changes the graph around
it if it fits, and returns whether it did. Its docstring shows the graph before and after. A new
pass is one function and its place in one of the lists below.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from torchq.lowering.passes.editor import GraphEditor
from torchq.lowering.passes.epilogue import (
    fold_batchnorm,
    fuse_activation,
    fuse_add,
    fuse_requantize,
)
from torchq.lowering.passes.finish import (
    propagate_qparams,
    read_shape_of_codes,
    trust_finite_values,
)
from torchq.lowering.passes.insert import (
    build_dict_by_module,
    check_none_by_module,
    drop_identity,
    expose_input_quantizer,
    open_quantized_concat,
    open_quantized_operator,
    quantize_layer_input,
    replace_quantizer,
    select_chunk,
    view_to_reshape,
)
from torchq.lowering.passes.move import (
    absorb_clamp,
    average_codes,
    cancel_qdq,
    hoist_quantize,
    merge_quantize,
    sink_dequantize,
    use_unsigned_codes,
)

__all__ = ["FINISH", "FUSE", "INSERT_QDQ", "NodePass", "apply_pass", "run_passes"]

NodePass = Callable[[GraphEditor, fx.Node], bool]

#: Bring the trace into known forms and make every quantization a node. Each pass runs once, in
#: the order of the graph. The check of arguments comes first, as no other node reads it.
INSERT_QDQ: tuple[NodePass, ...] = (
    check_none_by_module,
    build_dict_by_module,
    drop_identity,
    view_to_reshape,
    select_chunk,
    open_quantized_concat,
    open_quantized_operator,
    replace_quantizer,
    expose_input_quantizer,
    quantize_layer_input,
)

#: Fuse until nothing changes. The order matters: clamps become part of codes before kernels would
#: compute them, and kernels take what nothing else could.
FUSE: tuple[NodePass, ...] = (
    merge_quantize,
    cancel_qdq,
    use_unsigned_codes,
    absorb_clamp,
    hoist_quantize,
    sink_dequantize,
    fold_batchnorm,
    fuse_activation,
    fuse_add,
    average_codes,
    fuse_requantize,
)

#: Decide what depends on the finished graph. Each pass runs once, in the order of the graph.
FINISH: tuple[NodePass, ...] = (
    read_shape_of_codes,
    propagate_qparams,
    trust_finite_values,
)


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


def apply_pass(editor: GraphEditor, rewrite: NodePass) -> bool:
    """Apply one pass to every node that is there now; return whether it changed anything."""
    changed, present = False, set(editor.graph.nodes)
    for node in list(editor.graph.nodes):
        if node in present and rewrite(editor, node):
            editor.prune()
            changed, present = True, set(editor.graph.nodes)
    return changed
