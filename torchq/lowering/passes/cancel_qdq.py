"""Passes that drop quantizations which repeat another one."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.qdq import Dequantize, Quantize
from torchq.lowering.qparams import QParams

__all__ = ["cancel_qdq", "merge_quantize"]


def merge_quantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Quantize one tensor once for all readers with the same qparams.

    Before::

        x -+-> Quantize(q) -> reader
           +-> Quantize(q) -> reader

    After::

        x -> Quantize(q) -+-> reader
                          +-> reader
    """
    changed = False
    first: dict[QParams, fx.Node] = {}
    for user in sorted(node.users):
        module = editor.module(user)
        if not isinstance(module, Quantize):
            continue
        if module.qparams in first:
            editor.bypass(user, first[module.qparams])
            changed = True
        else:
            first[module.qparams] = user
    return changed


def cancel_qdq(editor: GraphEditor, node: fx.Node) -> bool:
    """Cancel a Dequantize whose result is quantized to the same codes.

    Before::

        codes -> Dequantize(q) -> Quantize(q) -> reader

    After::

        codes -> reader
    """
    quantize, values = editor.module(node), match.input_node(node)
    dequantize, codes = editor.module(values), match.input_node(values)
    if not isinstance(quantize, Quantize) or not isinstance(dequantize, Dequantize):
        return False
    if codes is None or quantize.qparams != dequantize.qparams:
        return False
    editor.bypass(node, codes)
    return True
