"""Pass that moves a Dequantize down, so that what it passes runs on codes."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph.editor import GraphEditor, base_name
from torchq.lowering.modules.qdq import Dequantize
from torchq.lowering.passes.hoist_quantize import tensors_to_rearrange
from torchq.lowering.passes.int_pooling import pool_codes

__all__ = ["sink_dequantize"]


def sink_dequantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Dequantize after max pooling, concatenation or a view instead of before it.

    All tensors must come from codes with the same qparams.

    Before::

        x -> Dequantize(q) -+
                            +-> concat, max pooling or view -> reader
        y -> Dequantize(q) -+

    After::

        x, y -> the same on codes -> Dequantize(q) -> reader
    """
    values = tensors_to_rearrange(editor, node)
    modules = [editor.module(value) for value in values]
    found = [module for module in modules if isinstance(module, Dequantize)]
    if not found or len(found) < len(values) or len({m.qparams for m in found}) > 1:
        return False
    for value in values:
        node.replace_input_with(value, value.all_input_nodes[0])
    node = pool_codes(editor, node)
    dequantize = Dequantize(found[0].qparams, editor.dtype)
    with editor.graph.inserting_after(node):
        result = editor.insert_call(f"{base_name(node)}_values", dequantize, node)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    return True
